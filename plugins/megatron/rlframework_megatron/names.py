"""Map the weight names that `save_pretrained` writes to their locations in Megatron's parameters.

Covers Llama, Qwen2, Qwen3 and Qwen3-MoE, with one weight per expert. Everything is computed from a configuration and
`Coordinates`, without a model or communication, so each rank knows what every rank holds. Parameter names are those of
megatron-core's GPTModel with the local layer specification and sequential experts; with `Coordinates.fused`, those of
Transformer Engine's norms inside linear layers and its grouped experts. `weight_layout` defines the sharding.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlframework.errors import ConfigError, NotSupported
from rlframework_megatron.coordinates import Coordinates
from rlframework_megatron.weight_layout import Columns, Gated, Grouped, Region, Vocabulary, WeightLayout

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""The supported values of `model_type`."""

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
    return Owner(coordinates.stage_of(virtual_stage), expert, weight.layout.split)


def _virtual_stage_of(weight: Weight, config: Any, coordinates: Coordinates) -> tuple[int, int]:
    """The virtual stage that holds `weight`, and the index of its layer in that stage."""
    if weight.layer is None:
        return coordinates.virtual_stages - 1 if weight.last else 0, 0
    starts = coordinates.first_layers(config.num_hidden_layers)
    virtual_stage = max(number for number in range(coordinates.virtual_stages) if starts[number] <= weight.layer)
    return virtual_stage, weight.layer - starts[virtual_stage]


def _experts_each(config: Any, coordinates: Coordinates) -> int:
    experts = int(config.num_experts)
    each, left = divmod(experts, coordinates.expert_size)
    if left:
        raise ConfigError(f"{experts} experts are not divisible by policy.parallelism.expert={coordinates.expert_size}")
    return each


def _regions(weight: Weight, coordinates: Coordinates) -> tuple[Region, ...]:
    rank, size = coordinates.tensor_rank, coordinates.tensor_size
    if weight.expert is not None:
        rank, size = coordinates.expert_tensor_rank, coordinates.expert_tensor_size
    layout = weight.layout
    if isinstance(layout, Vocabulary):
        layout = Vocabulary(padded=coordinates.vocabulary(weight.shape[0]))
    return tuple(layout.regions(weight.shape, rank, size))


# -- the models -------------------------------------------------------------------------------------------------------


def require_convertible(config: Any) -> None:
    """Raise `NotSupported` if this backend's GPTModel cannot represent the weights of the model of `config`."""
    if config.model_type not in KINDS:
        raise NotSupported(
            f"the megatron backend cannot convert the weights of a {config.model_type!r} model; it supports "
            f"{', '.join(KINDS)}. Set policy.backend to dtensor"
        )
    biases = [key for key in ("attention_bias", "mlp_bias") if getattr(config, key, False)]
    if biases:
        raise NotSupported(
            f"the model's configuration sets {' and '.join(biases)}; the megatron backend supports only the query, key "
            "and value biases of Qwen2. Set policy.backend to dtensor"
        )


def model_weights(config: Any) -> list[Weight]:
    """All weights of the model of `config`, in layer order; a tied head is listed as the embedding only."""
    require_convertible(config)
    hidden, vocabulary = config.hidden_size, config.vocab_size
    found = [Weight(EMBEDDING, (vocabulary, hidden), "embedding.word_embeddings.weight", Vocabulary())]
    for layer in range(config.num_hidden_layers):
        found += _layer(config, layer)
    found.append(Weight("model.norm.weight", (hidden,), "decoder.final_layernorm.weight", WeightLayout(), last=True))
    if gives_scores(config):
        found.append(Weight(SCORE, (1, hidden), "output_layer.weight", WeightLayout(), last=True))
    elif not is_tied(config):
        found.append(Weight(HEAD, (vocabulary, hidden), "output_layer.weight", Vocabulary(), last=True))
    return found


def _layer(config: Any, layer: int) -> list[Weight]:
    hidden = config.hidden_size
    outside, inside = f"model.layers.{layer}.", "decoder.layers.{layer}."

    def norm(name: str, parameter: str, size: int = hidden) -> Weight:
        return Weight(f"{outside}{name}.weight", (size,), f"{inside}{parameter}.weight", WeightLayout(), layer)

    return [
        *_attention(config, layer, outside, inside),
        *([norm("self_attn.q_norm", "self_attention.q_layernorm", head_size(config))] if _norms_heads(config) else []),
        *([norm("self_attn.k_norm", "self_attention.k_layernorm", head_size(config))] if _norms_heads(config) else []),
        *(_experts(config, layer) if is_sparse(config, layer) else _mlp(config.intermediate_size, hidden, layer)),
        norm("input_layernorm", "input_layernorm"),
        norm("post_attention_layernorm", "pre_mlp_layernorm"),
    ]


def _attention(config: Any, layer: int, outside: str, inside: str) -> Iterator[Weight]:
    """Weights of one fused parameter are adjacent, so that it is gathered only once."""
    hidden, groups, head = config.hidden_size, config.num_key_value_heads, head_size(config)
    queries = config.num_attention_heads // groups * head
    starts = {"q": (0, queries), "k": (queries, head), "v": (queries + head, head)}
    ends = ("weight", "bias") if config.model_type == "qwen2" else ("weight",)
    for end, (kind, (start, rows)) in itertools.product(ends, starts.items()):
        shape = (groups * rows, hidden) if end == "weight" else (groups * rows,)
        layout = Grouped(groups=groups, start=start, rows=rows, all_rows=queries + 2 * head)
        name, parameter = f"{outside}self_attn.{kind}_proj.{end}", f"{inside}self_attention.linear_qkv.{end}"
        yield Weight(name, shape, parameter, layout, layer)
    name, parameter = f"{outside}self_attn.o_proj.weight", f"{inside}self_attention.linear_proj.weight"
    yield Weight(name, (hidden, config.num_attention_heads * head), parameter, Columns(), layer)


def _mlp(size: int, hidden: int, layer: int, expert: int | None = None) -> Iterator[Weight]:
    """Gate, up and down projections of a dense layer or of one expert."""
    outside, inside = f"model.layers.{layer}.mlp.", "decoder.layers.{layer}.mlp."
    if expert is not None:
        outside, inside = f"{outside}experts.{expert}.", f"{inside}experts.local_experts.{{expert}}."
    for half, kind in enumerate(("gate", "up")):
        name, parameter = f"{outside}{kind}_proj.weight", f"{inside}linear_fc1.weight"
        yield Weight(name, (size, hidden), parameter, Gated(half=half), layer, expert)
    yield Weight(f"{outside}down_proj.weight", (hidden, size), f"{inside}linear_fc2.weight", Columns(), layer, expert)


def _experts(config: Any, layer: int) -> Iterator[Weight]:
    name, parameter = f"model.layers.{layer}.mlp.gate.weight", "decoder.layers.{layer}.mlp.router.weight"
    yield Weight(name, (config.num_experts, config.hidden_size), parameter, WeightLayout(), layer)
    for expert in range(config.num_experts):
        yield from _mlp(config.moe_intermediate_size, config.hidden_size, layer, expert)


def is_sparse(config: Any, layer: int) -> bool:
    """Whether the layer has experts."""
    if config.model_type != "qwen3_moe" or not config.num_experts or layer in config.mlp_only_layers:
        return False
    return (layer + 1) % int(config.decoder_sparse_step) == 0


def gives_scores(config: Any) -> bool:
    """Whether the model is a reward model."""
    return bool(getattr(config, GIVES_SCORES, False))


def is_tied(config: Any) -> bool:
    """Whether the head is tied to the embedding."""
    return bool(config.tie_word_embeddings) and not gives_scores(config)


def head_size(config: Any) -> int:
    """The size of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _norms_heads(config: Any) -> bool:
    return config.model_type in ("qwen3", "qwen3_moe")
