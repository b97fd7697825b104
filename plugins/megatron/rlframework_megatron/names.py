"""Map the weight names that `save_pretrained` writes to their locations in Megatron's parameters.

Covers `ARCHITECTURES`. Everything is computed from a configuration and
`Coordinates`, without a model or communication, so each rank knows what every rank holds. Parameter names are those of
megatron-core's GPTModel with the local layer specification and sequential experts; with `Coordinates.fused`, those of
Transformer Engine's norms inside linear layers and its grouped experts. `weight_layout` defines the sharding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlframework.base.errors import ConfigError, NotSupported
from rlframework.engine import Region
from rlframework_megatron.architectures import (
    ARCHITECTURES,
    Mixture,
    architecture,
    expert_count,
    is_sparse,
    value_of,
)
from rlframework_megatron.coordinates import Coordinates
from rlframework_megatron.weight_layout import (
    COLUMNS,
    GATE,
    GATE_UP,
    REPLICATED,
    ROWS,
    UP,
    VOCABULARY,
    WeightLayout,
    grouped,
)

EMBEDDING, HEAD, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
GIVES_SCORES = "gives_scores"
"""Attribute set on the transformers configuration of a reward model, whose `score` weight replaces the head."""

_BEFORE_ATTENTION, _BEFORE_MLP = "input_layernorm.weight", "pre_mlp_layernorm.weight"
_EXPERT = re.compile(r"local_experts\.(\d+)\.(linear_fc[12])\.weight$")


@dataclass(frozen=True)
class Weight:
    """A weight of the whole model. `parameter`: its name in a chunk, with local `{layer}` and `{expert}` indices."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    layout: WeightLayout
    layer: int | None = None
    expert: int | None = None
    last: bool = False
    """For a weight outside the layers: whether it is on the last stage rather than the first."""


@dataclass(frozen=True)
class WeightShard:
    """A rank's shard of one weight, stored in one of its parameters.

    `regions`: slices of the whole weight and their slices of the parameter; several for heads in a fused matrix, none
    if the rank holds only padding rows. `is_copy`: another rank owns the weight (a tied head).
    """

    name: str
    shape: tuple[int, ...]
    parameter: str
    chunk: int
    regions: tuple[Region, ...]
    is_copy: bool = False


@dataclass(frozen=True)
class Owner:
    """The ranks that own a weight: a pipeline stage, an expert rank (None: all), and whether tensor ranks split it."""

    stage: int
    expert_rank: int | None
    split: bool

    def is_at(self, coordinates: Coordinates) -> bool:
        """Whether the rank at `coordinates` is one of them."""
        return coordinates.pipeline_rank == self.stage and self.expert_rank in (None, coordinates.expert_rank)


def weight_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights of the model of a transformers `config`, by name; tied weights once."""
    return {weight.name: weight.shape for weight in model_weights(config)}


def local_shards(config: Any, coordinates: Coordinates) -> list[WeightShard]:
    """Shards that the rank at `coordinates` holds of the model of `config`, in the order of the model's weights."""
    return [shard for weight in model_weights(config) for shard in shards_of(weight, config, coordinates)]


def shards_of(weight: Weight, config: Any, coordinates: Coordinates) -> Iterator[WeightShard]:
    """Yield the shard of `weight` on the rank at `coordinates`, if any.

    With several virtual stages, the last one has a copy of the embedding as its tied head.
    """
    virtual_stage, layer = _virtual_stage_of(weight, config, coordinates)
    expert = weight.expert
    if expert is not None:
        share = _experts_each(config, coordinates)
        is_local = expert // share == coordinates.expert_rank
        expert %= share
    else:
        is_local = True
    if is_local and coordinates.holds(virtual_stage):
        name = weight.parameter.format(layer=layer, expert=expert)
        name = _fused(name, weight, config) if coordinates.fused else name
        yield WeightShard(
            weight.name, weight.shape, name, coordinates.chunk_of(virtual_stage), _regions(weight, coordinates)
        )
    last = coordinates.virtual_stages - 1
    if weight.name == EMBEDDING and is_tied(config) and last > 0 and coordinates.holds(last):
        regions = _regions(weight, coordinates)
        yield WeightShard(
            weight.name, weight.shape, "output_layer.weight", coordinates.chunk_of(last), regions, is_copy=True
        )


def _fused(name: str, weight: Weight, config: Any) -> str:
    """The parameter name in a Transformer Engine layer, where norms are fused into the following linear layer."""
    if weight.expert is not None:
        return _EXPERT.sub(r"\2.weight\1", name)
    if name.endswith(_BEFORE_ATTENTION):
        return name.removesuffix(_BEFORE_ATTENTION) + "self_attention.linear_qkv.layer_norm_weight"
    if name.endswith(_BEFORE_MLP) and weight.layer is not None and not is_sparse(config, weight.layer):
        return name.removesuffix(_BEFORE_MLP) + "mlp.linear_fc1.layer_norm_weight"
    return name


def owner_of(weight: Weight, config: Any, coordinates: Coordinates) -> Owner:
    """The owner of `weight` among the ranks of the model replica described by `coordinates`."""
    virtual_stage, _ = _virtual_stage_of(weight, config, coordinates)
    expert = None if weight.expert is None else weight.expert // _experts_each(config, coordinates)
    return Owner(coordinates.stage_of(virtual_stage), expert, weight.layout.split is not None)


def _virtual_stage_of(weight: Weight, config: Any, coordinates: Coordinates) -> tuple[int, int]:
    """The virtual stage that holds `weight`, and the index of its layer in that stage."""
    if weight.layer is None:
        return coordinates.virtual_stages - 1 if weight.last else 0, 0
    starts = coordinates.first_layers(config.num_hidden_layers)
    virtual_stage = max(number for number in range(coordinates.virtual_stages) if starts[number] <= weight.layer)
    return virtual_stage, weight.layer - starts[virtual_stage]


def _experts_each(config: Any, coordinates: Coordinates) -> int:
    experts = expert_count(config)
    each, left = divmod(experts, coordinates.expert_size)
    if left:
        raise ConfigError(f"{experts} experts are not divisible by policy.parallelism.expert={coordinates.expert_size}")
    return each


def _regions(weight: Weight, coordinates: Coordinates) -> tuple[Region, ...]:
    rank, size = coordinates.tensor_rank, coordinates.tensor_size
    if weight.expert is not None:
        rank, size = coordinates.expert_tensor_rank, coordinates.expert_tensor_size
    padded = coordinates.vocabulary(weight.shape[0]) if weight.layout.is_padded else 0
    return tuple(weight.layout.regions(weight.shape, rank, size, padded))


# -- the models -------------------------------------------------------------------------------------------------------


def require_convertible(config: Any) -> None:
    """Raise `NotSupported` if this backend's GPTModel cannot represent the weights of the model of `config`."""
    if config.model_type not in ARCHITECTURES:
        raise NotSupported(
            f"the megatron backend cannot convert the weights of a {config.model_type!r} model; it supports "
            f"{', '.join(ARCHITECTURES)}. Set policy.backend to dtensor"
        )


def model_weights(config: Any) -> list[Weight]:
    """All weights of the model of `config`, in layer order; a tied head is listed as the embedding only."""
    require_convertible(config)
    hidden, vocabulary = config.hidden_size, config.vocab_size
    found = [Weight(EMBEDDING, (vocabulary, hidden), "embedding.word_embeddings.weight", VOCABULARY)]
    for layer in range(config.num_hidden_layers):
        found += _layer(config, layer)
    found.append(Weight("model.norm.weight", (hidden,), "decoder.final_layernorm.weight", REPLICATED, last=True))
    if gives_scores(config):
        found.append(Weight(SCORE, (1, hidden), "output_layer.weight", REPLICATED, last=True))
    elif not is_tied(config):
        found.append(Weight(HEAD, (vocabulary, hidden), "output_layer.weight", VOCABULARY, last=True))
    return found


def _layer(config: Any, layer: int) -> Iterator[Weight]:
    """The weights of a layer; the functions below name them, and their parameters, within it."""
    mlp = _experts(config) if is_sparse(config, layer) else _mlp(config)
    for weight in (*_attention(config), *_head_norms(config), *mlp, *_norms(config)):
        name, parameter = f"model.layers.{layer}.{weight.name}", f"decoder.layers.{{layer}}.{weight.parameter}"
        yield replace(weight, name=name, parameter=parameter, layer=layer)


def _norms(config: Any) -> Iterator[Weight]:
    norms = architecture(config).norms
    parameters = {
        "input_layernorm": norms.before_attention,
        "self_attn_bda.norm": norms.after_attention,
        "pre_mlp_layernorm": norms.before_mlp,
        "mlp_bda.norm": norms.after_mlp,
    }
    for parameter, name in parameters.items():
        if name is not None:
            yield Weight(f"{name}.weight", (config.hidden_size,), f"{parameter}.weight", REPLICATED)


def _head_norms(config: Any) -> Iterator[Weight]:
    kind, size = architecture(config).head_norms, head_size(config)
    for letter, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        if kind is not None:
            shape, layout = ((size,), REPLICATED) if kind == "head" else ((heads * size,), ROWS)
            yield Weight(f"self_attn.{letter}_norm.weight", shape, f"self_attention.{letter}_layernorm.weight", layout)


def _attention(config: Any) -> Iterator[Weight]:
    """Weights of one fused parameter are adjacent, so that it is gathered only once."""
    found, hidden, heads = architecture(config), config.hidden_size, config.num_attention_heads
    for end in ("weight", "bias") if value_of(config, found.qkv_bias) else ("weight",):
        width = (hidden,) if end == "weight" else ()
        for kind, rows, layout in _qkv(config, fused=found.fused_qkv):
            yield Weight(f"self_attn.{kind}_proj.{end}", (rows, *width), f"self_attention.linear_qkv.{end}", layout)
    shape = (hidden, heads * head_size(config))
    yield Weight("self_attn.o_proj.weight", shape, "self_attention.linear_proj.weight", COLUMNS)
    if value_of(config, found.output_bias):
        yield Weight("self_attn.o_proj.bias", (hidden,), "self_attention.linear_proj.bias", REPLICATED)
    if found.sinks:
        yield Weight("self_attn.sinks", (heads,), "self_attention.core_attention.sinks", ROWS)


def _qkv(config: Any, *, fused: bool) -> Iterator[tuple[str, int, WeightLayout]]:
    """The name, rows and layout of each matrix of `linear_qkv` in files."""
    groups, head = config.num_key_value_heads, head_size(config)
    queries = config.num_attention_heads // groups * head
    if fused:
        yield "qkv", groups * (queries + 2 * head), grouped(groups, queries, head, 0, 1, 2)
        return
    for block, (kind, rows) in enumerate((("q", queries), ("k", head), ("v", head))):
        yield kind, groups * rows, grouped(groups, queries, head, block)


def _mlp(config: Any) -> Iterator[Weight]:
    """Gate, up and down projections of a dense layer."""
    found, hidden, size = architecture(config), config.hidden_size, config.intermediate_size
    if found.fused_gate_up:
        yield Weight("mlp.gate_up_proj.weight", (2 * size, hidden), "mlp.linear_fc1.weight", GATE_UP)
        yield Weight("mlp.down_proj.weight", (hidden, size), "mlp.linear_fc2.weight", COLUMNS)
        return
    yield from _gated(hidden, size, "mlp", "mlp", Mixture().projections)
    if value_of(config, found.mlp_bias):
        yield Weight("mlp.gate_proj.bias", (size,), "mlp.linear_fc1.bias", GATE)
        yield Weight("mlp.up_proj.bias", (size,), "mlp.linear_fc1.bias", UP)
        yield Weight("mlp.down_proj.bias", (hidden,), "mlp.linear_fc2.bias", REPLICATED)


def _gated(
    hidden: int, size: int, block: str, module: str, projections: tuple[str, str, str], expert: int | None = None
) -> Iterator[Weight]:
    """The matrices `projections` of `block`, in the parameters of `module`."""
    for name, half in zip(projections, (GATE, UP), strict=False):
        yield Weight(f"{block}.{name}.weight", (size, hidden), f"{module}.linear_fc1.weight", half, expert=expert)
    down = f"{block}.{projections[2]}.weight"
    yield Weight(down, (hidden, size), f"{module}.linear_fc2.weight", COLUMNS, expert=expert)


def _experts(config: Any) -> Iterator[Weight]:
    mixture = architecture(config).mixture
    assert mixture is not None
    block, router, projections = mixture.block, f"{mixture.block}.{mixture.router}", mixture.projections
    count, hidden, size = expert_count(config), config.hidden_size, int(getattr(config, mixture.width))
    yield Weight(f"{router}.weight", (count, hidden), "mlp.router.weight", REPLICATED)
    if mixture.stacked:
        yield Weight(f"{router}.bias", (count,), "mlp.router.bias", REPLICATED)
        shapes = {"gate_up_proj": (hidden, 2 * size), "gate_up_proj_bias": (2 * size,)}
        shapes |= {"down_proj": (size, hidden), "down_proj_bias": (hidden,)}
        for name, shape in shapes.items():
            yield Weight(f"{block}.experts.{name}", (count, *shape), f"mlp.experts.{name}", REPLICATED)
        return
    for expert in range(count):
        module = "mlp.experts.local_experts.{expert}"
        yield from _gated(hidden, size, f"{block}.experts.{expert}", module, projections, expert)
    if mixture.shared:
        size = int(config.shared_expert_intermediate_size)
        yield from _gated(hidden, size, f"{block}.shared_expert", "mlp.shared_experts", projections)
        yield Weight(f"{block}.shared_expert_gate.weight", (1, hidden), "mlp.shared_experts.gate_weight", REPLICATED)


def gives_scores(config: Any) -> bool:
    """Whether the model is a reward model."""
    return bool(getattr(config, GIVES_SCORES, False))


def is_tied(config: Any) -> bool:
    """Whether the head is tied to the embedding."""
    return bool(config.tie_word_embeddings) and not gives_scores(config)


def head_size(config: Any) -> int:
    """The size of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
