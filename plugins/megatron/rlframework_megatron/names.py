"""The weights of a model by the names that `save_pretrained` writes, and where each lies in Megatron's parameters.

Llama, Qwen2, Qwen3 and Qwen3-MoE, experts one by one. Pure: from a configuration and a `Place`, with no model and no
communication, so that each rank knows what every rank holds. Names of parameters are those of megatron-core's GPTModel
with the local layer specification and sequential experts, and for `Place.fused` those of Transformer Engine's norms
inside linear layers and of its grouped experts. How a weight is cut is in `cuts`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlframework.errors import ConfigError, NotSupported
from rlframework_megatron.coordinates import Place
from rlframework_megatron.weight_layout import Columns, Cut, Gated, Grouped, Region, Vocabulary

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""The `model_type`s that can be converted."""

EMBEDDING, HEAD, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
GIVES_SCORES = "gives_scores"
"""Set on a configuration of transformers that is of a reward model, which has `score` in the place of a head."""

_BEFORE_ATTENTION, _BEFORE_MLP = "input_layernorm.weight", "pre_mlp_layernorm.weight"
_EXPERT = re.compile(r"local_experts\.(\d+)\.(linear_fc[12])\.weight$")


@dataclass(frozen=True)
class Weight:
    """A weight of the whole model. `parameter`: its name in a model chunk, `{layer}` and `{expert}` counted there."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    cut: Cut
    layer: int | None = None
    expert: int | None = None
    last: bool = False
    """Without a layer: whether it is with the last layers, and not with the first."""


@dataclass(frozen=True)
class Part:
    """What a rank has of one weight, in one of its parameters.

    `regions`: boxes of the whole weight and where they lie in the parameter; several for heads in a fused matrix, none
    where the rank has rows of padding only. `is_copy`: the weight has another home, which tells it (a tied head).
    """

    name: str
    shape: tuple[int, ...]
    parameter: str
    chunk: int
    regions: tuple[Region, ...]
    is_copy: bool = False


@dataclass(frozen=True)
class Home:
    """Who tells a weight: a stage of the pipeline, one expert rank or all (None), and whether tensor ranks share it."""

    stage: int
    expert_rank: int | None
    split: bool


def weight_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights of the model of `config`, a configuration of transformers, by name; tied ones once."""
    return {weight.name: weight.shape for weight in model_weights(config)}


def local_parts(config: Any, place: Place) -> list[Part]:
    """What the rank at `place` has of the model of `config`, in the order of the model's weights."""
    return [part for weight in model_weights(config) for part in parts_of(weight, config, place)]


def parts_of(weight: Weight, config: Any, place: Place) -> Iterator[Part]:
    """What the rank at `place` has of `weight`: nothing, or one part.

    A tied head is a copy of the embedding where the pipeline has more than one piece: on the last.
    """
    piece, layer = _piece(weight, config, place)
    expert = weight.expert
    if expert is not None:
        share = _experts_each(config, place)
        here = expert // share == place.expert_rank
        expert %= share
    else:
        here = True
    if here and place.here(piece):
        name = weight.parameter.format(layer=layer, expert=expert)
        name = _fused(name, weight, config) if place.fused else name
        yield Part(weight.name, weight.shape, name, place.chunk_of(piece), _regions(weight, place))
    last = place.pieces - 1
    if weight.name == EMBEDDING and is_tied(config) and last > 0 and place.here(last):
        regions = _regions(weight, place)
        yield Part(weight.name, weight.shape, "output_layer.weight", place.chunk_of(last), regions, is_copy=True)


def _fused(name: str, weight: Weight, config: Any) -> str:
    """The `name` of a parameter in a layer of Transformer Engine: norms lie in the linear layer that follows them."""
    if weight.expert is not None:
        return _EXPERT.sub(r"\2.weight\1", name)
    if name.endswith(_BEFORE_ATTENTION):
        return name.removesuffix(_BEFORE_ATTENTION) + "self_attention.linear_qkv.layer_norm_weight"
    if name.endswith(_BEFORE_MLP) and weight.layer is not None and not is_sparse(config, weight.layer):
        return name.removesuffix(_BEFORE_MLP) + "mlp.linear_fc1.layer_norm_weight"
    return name


def home(weight: Weight, config: Any, place: Place) -> Home:
    """Who tells `weight`, on all ranks that share a model as the one at `place` does."""
    piece, _ = _piece(weight, config, place)
    expert = None if weight.expert is None else weight.expert // _experts_each(config, place)
    return Home(place.stage_of(piece), expert, weight.cut.split)


def _piece(weight: Weight, config: Any, place: Place) -> tuple[int, int]:
    """The piece of the pipeline that has `weight`, and the number of its layer there."""
    if weight.layer is None:
        return place.pieces - 1 if weight.last else 0, 0
    starts = place.first_layers(config.num_hidden_layers)
    piece = max(number for number in range(place.pieces) if starts[number] <= weight.layer)
    return piece, weight.layer - starts[piece]


def _experts_each(config: Any, place: Place) -> int:
    experts = int(config.num_experts)
    each, left = divmod(experts, place.expert_size)
    if left:
        raise ConfigError(f"{experts} experts do not divide over policy.parallelism.expert={place.expert_size}")
    return each


def _regions(weight: Weight, place: Place) -> tuple[Region, ...]:
    rank, size = place.tensor_rank, place.tensor_size
    if weight.expert is not None:
        rank, size = place.expert_tensor_rank, place.expert_tensor_size
    cut = weight.cut
    if isinstance(cut, Vocabulary):
        cut = Vocabulary(padded=place.vocabulary(weight.shape[0]))
    return tuple(cut.regions(weight.shape, rank, size))


# -- the models -------------------------------------------------------------------------------------------------------


def require_convertible(config: Any) -> None:
    """`NotSupported` where the weights of the model of `config` have no place in a GPTModel as it is built here."""
    if config.model_type not in KINDS:
        raise NotSupported(
            f"the megatron backend has no names for the weights of a {config.model_type!r} model; it has them for "
            f"{', '.join(KINDS)}. Set policy.backend to dtensor"
        )
    biases = [key for key in ("attention_bias", "mlp_bias") if getattr(config, key, False)]
    if biases:
        raise NotSupported(
            f"the model's configuration sets {' and '.join(biases)}, and the megatron backend has biases of queries, "
            "keys and values of Qwen2 only. Set policy.backend to dtensor"
        )


def model_weights(config: Any) -> list[Weight]:
    """All weights of the model of `config`, in the order of its layers; a tied head is the embedding."""
    require_convertible(config)
    hidden, vocabulary = config.hidden_size, config.vocab_size
    found = [Weight(EMBEDDING, (vocabulary, hidden), "embedding.word_embeddings.weight", Vocabulary())]
    for layer in range(config.num_hidden_layers):
        found += _layer(config, layer)
    found.append(Weight("model.norm.weight", (hidden,), "decoder.final_layernorm.weight", Cut(), last=True))
    if gives_scores(config):
        found.append(Weight(SCORE, (1, hidden), "output_layer.weight", Cut(), last=True))
    elif not is_tied(config):
        found.append(Weight(HEAD, (vocabulary, hidden), "output_layer.weight", Vocabulary(), last=True))
    return found


def _layer(config: Any, layer: int) -> list[Weight]:
    hidden = config.hidden_size
    outside, inside = f"model.layers.{layer}.", "decoder.layers.{layer}."

    def norm(name: str, parameter: str, size: int = hidden) -> Weight:
        return Weight(f"{outside}{name}.weight", (size,), f"{inside}{parameter}.weight", Cut(), layer)

    return [
        *_attention(config, layer, outside, inside),
        *([norm("self_attn.q_norm", "self_attention.q_layernorm", head_size(config))] if _norms_heads(config) else []),
        *([norm("self_attn.k_norm", "self_attention.k_layernorm", head_size(config))] if _norms_heads(config) else []),
        *(_experts(config, layer) if is_sparse(config, layer) else _mlp(config.intermediate_size, hidden, layer)),
        norm("input_layernorm", "input_layernorm"),
        norm("post_attention_layernorm", "pre_mlp_layernorm"),
    ]


def _attention(config: Any, layer: int, outside: str, inside: str) -> Iterator[Weight]:
    """What lies in one parameter follows one another, so that it is put together once to be told."""
    hidden, groups, head = config.hidden_size, config.num_key_value_heads, head_size(config)
    queries = config.num_attention_heads // groups * head
    starts = {"q": (0, queries), "k": (queries, head), "v": (queries + head, head)}
    ends = ("weight", "bias") if config.model_type == "qwen2" else ("weight",)
    for end, (kind, (start, rows)) in itertools.product(ends, starts.items()):
        shape = (groups * rows, hidden) if end == "weight" else (groups * rows,)
        cut = Grouped(groups=groups, start=start, rows=rows, all_rows=queries + 2 * head)
        name, parameter = f"{outside}self_attn.{kind}_proj.{end}", f"{inside}self_attention.linear_qkv.{end}"
        yield Weight(name, shape, parameter, cut, layer)
    name, parameter = f"{outside}self_attn.o_proj.weight", f"{inside}self_attention.linear_proj.weight"
    yield Weight(name, (hidden, config.num_attention_heads * head), parameter, Columns(), layer)


def _mlp(size: int, hidden: int, layer: int, expert: int | None = None) -> Iterator[Weight]:
    """Gate, up and down of a dense layer, or of one expert."""
    outside, inside = f"model.layers.{layer}.mlp.", "decoder.layers.{layer}.mlp."
    if expert is not None:
        outside, inside = f"{outside}experts.{expert}.", f"{inside}experts.local_experts.{{expert}}."
    for half, kind in enumerate(("gate", "up")):
        name, parameter = f"{outside}{kind}_proj.weight", f"{inside}linear_fc1.weight"
        yield Weight(name, (size, hidden), parameter, Gated(half=half), layer, expert)
    yield Weight(f"{outside}down_proj.weight", (hidden, size), f"{inside}linear_fc2.weight", Columns(), layer, expert)


def _experts(config: Any, layer: int) -> Iterator[Weight]:
    name, parameter = f"model.layers.{layer}.mlp.gate.weight", "decoder.layers.{layer}.mlp.router.weight"
    yield Weight(name, (config.num_experts, config.hidden_size), parameter, Cut(), layer)
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
    """Whether the head is the embedding."""
    return bool(config.tie_word_embeddings) and not gives_scores(config)


def head_size(config: Any) -> int:
    """Elements of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _norms_heads(config: Any) -> bool:
    return config.model_type in ("qwen3", "qwen3_moe")
