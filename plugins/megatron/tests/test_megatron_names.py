"""Names and locations of weights, without Megatron: shard a whole model for each rank and reassemble it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlframework.base.errors import ConfigError, NotSupported
from rlframework.models.file_weights import by_file_names
from rlframework.policy.tensor_shards import flat_shards
from rlframework_megatron.coordinates import Coordinates
from rlframework_megatron.main_params import flat_shards_of
from rlframework_megatron.names import EMBEDDING, HEAD, WeightShard, local_shards, weight_shapes
from rlframework_megatron.weight_layout import extent

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "max_position_embeddings": 8}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
KINDS = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 4}),
    "experts": ("Qwen3Moe", EXPERTS),
    "dense_between": ("Qwen3Moe", {**EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
}


def config_of(kind: str, **changes: Any) -> Any:
    import transformers

    family, own = KINDS[kind]
    keys = {**SIZES, **HEADS, "vocab_size": 41, "tie_word_embeddings": False, **own, **changes}
    return getattr(transformers, f"{family}Config")(**keys)


def whole_model(config: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in weight_shapes(config).items()}


def cut(weights: dict[str, Tensor], shards: list[WeightShard]) -> dict[tuple[int, str], Tensor]:
    """The parameters of one rank, by chunk and name; elements that no shard fills are nan."""
    sizes: dict[tuple[int, str], list[int]] = {}
    for shard in shards:
        size = sizes.setdefault((shard.chunk, shard.parameter), [0] * len(shard.shape))
        for _, local_slices in shard.regions:
            size[:] = [max(old, one.stop) for old, one in zip(size, local_slices, strict=True)]
    found = {key: torch.full(size, torch.nan) for key, size in sizes.items()}
    for shard in shards:
        for whole, local_slices in shard.regions:
            target = found[shard.chunk, shard.parameter][local_slices]
            assert target.isnan().all(), f"{shard.parameter} is written twice"
            target.copy_(weights[shard.name][whole])
    return found


def places(coordinates: Coordinates) -> list[Coordinates]:
    """Of all ranks of a model that is split so."""
    axes = ("tensor", "pipeline", "expert", "expert_tensor")
    ranks = itertools.product(*(range(getattr(coordinates, f"{axis}_size")) for axis in axes))
    return [replace(coordinates, **{f"{axis}_rank": r for axis, r in zip(axes, rank, strict=True)}) for rank in ranks]


@pytest.mark.parametrize("kind", KINDS)
def test_the_names_and_shapes_are_those_of_files(kind):
    from transformers import AutoModelForCausalLM

    config = config_of(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    held = by_file_names(model, model.state_dict())
    if config.tie_word_embeddings:
        del held[HEAD]
    assert weight_shapes(config) == {name: tuple(tensor.shape) for name, tensor in held.items()}
    assert (HEAD in weight_shapes(config)) != config.tie_word_embeddings


@pytest.mark.parametrize(
    ("kind", "layer", "names"),
    [
        ("qwen3", 0, {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}),
        (
            "dense_between",  # experts are in layer 1 alone
            1,
            {"pre_mlp_layernorm.weight", "mlp.router.weight"}
            | {f"mlp.experts.linear_fc{number}.weight{expert}" for number in (1, 2) for expert in range(2)},
        ),
    ],
)
def test_transformer_engine_has_norms_in_linear_layers_and_experts_in_one(kind, layer, names):
    """The second of two ranks that share the experts: they count theirs from 0."""
    config = config_of(kind)
    shards = local_shards(config, Coordinates(expert_rank=1, expert_size=2, fused=True))
    inside = f"decoder.layers.{layer}."
    found = {shard.parameter.removeprefix(inside) for shard in shards if shard.parameter.startswith(inside)}
    attention = {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
    }
    assert found == attention | names
    assert shards[-2 if kind == "dense_between" else -1].parameter == "decoder.final_layernorm.weight"


LAYOUTS = st.builds(
    Coordinates,
    tensor_size=st.sampled_from([1, 2, 4, 8]),
    pipeline_size=st.sampled_from([1, 2, 4]),
    chunks=st.sampled_from([1, 2]),
    expert_size=st.sampled_from([1, 2, 4]),
    expert_tensor_size=st.sampled_from([1, 2]),
    padded_vocabulary=st.sampled_from([0, 48, 128]),
    fused=st.booleans(),
).filter(
    lambda coordinates: coordinates.virtual_stages <= 4 and (coordinates.chunks == 1 or coordinates.pipeline_size > 1)
)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), layout=LAYOUTS)
def test_shards_reassemble_the_weights(kind, layout):
    config = config_of(kind)
    weights = whole_model(config)
    joined = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}
    copies = {name: weight.clone() for name, weight in joined.items()}
    for coordinates in places(layout):
        shards = local_shards(config, coordinates)
        for shard in shards:
            own = cut(weights, [one for one in shards if (one.chunk, one.parameter) == (shard.chunk, shard.parameter)])
            target = (copies if shard.is_copy else joined)[shard.name]
            for whole, local_slices in shard.regions:
                target[whole] = own[shard.chunk, shard.parameter][local_slices]
    assert all(torch.equal(joined[name], weight) for name, weight in weights.items())
    tied_apart = config.tie_word_embeddings and layout.virtual_stages > 1
    assert torch.equal(copies[EMBEDDING], weights[EMBEDDING]) == tied_apart


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), layout=LAYOUTS)
def test_tensor_ranks_share_without_overlap(kind, layout):
    """Each element of a split weight is on one tensor rank; other weights are replicated."""
    config = config_of(kind)
    ranks = places(replace(layout, pipeline_size=1, chunks=1, expert_size=1, expert_tensor_size=1))
    sizes: dict[str, list[int]] = {name: [] for name in weight_shapes(config)}
    for shard in (shard for coordinates in ranks for shard in local_shards(config, coordinates)):
        sizes[shard.name].append(sum(extent(whole) for whole, _ in shard.regions))
    for name, shape in weight_shapes(config).items():
        whole = torch.Size(shape).numel()
        if any(word in name for word in ("norm", "mlp.gate.weight", ".experts.")):
            assert sizes[name] == [whole] * layout.tensor_size
        else:
            assert sum(sizes[name]) == whole


@pytest.mark.parametrize(("tensor", "rank"), [(1, 0), (2, 1), (4, 2), (8, 5)])
def test_the_fused_matrices_are_as_megatron_has_them(tensor, rank):
    """Compare with reshaping, concatenating and splitting the rows; with 8 ranks each has half a group."""
    config = config_of("qwen3")
    weights, layer = whole_model(config), "model.layers.2."
    own = cut(weights, local_shards(config, Coordinates(tensor_rank=rank, tensor_size=tensor)))
    q, k, v = (weights[f"{layer}self_attn.{kind}_proj.weight"] for kind in "qkv")
    groups = torch.cat([q.view(4, 8, 16), k.view(4, 4, 16), v.view(4, 4, 16)], 1).reshape(-1, 16)
    inside = "decoder.layers.2."
    assert torch.equal(own[0, f"{inside}self_attention.linear_qkv.weight"], groups.chunk(tensor)[rank])
    gate, up, down = (weights[f"{layer}mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
    both = torch.cat([gate.chunk(tensor)[rank], up.chunk(tensor)[rank]])
    assert torch.equal(own[0, f"{inside}mlp.linear_fc1.weight"], both)
    assert torch.equal(own[0, f"{inside}mlp.linear_fc2.weight"], down.chunk(tensor, 1)[rank])
    out = weights[f"{layer}self_attn.o_proj.weight"]
    assert torch.equal(own[0, f"{inside}self_attention.linear_proj.weight"], out.chunk(tensor, 1)[rank])
    padded = torch.nn.functional.pad(weights[EMBEDDING], (0, 0, 0, -41 % tensor)).chunk(tensor)[rank]
    rows = own[0, "embedding.word_embeddings.weight"]
    assert torch.equal(rows, padded[: len(rows)])


def test_the_biases_of_qwen2_are_fused_like_their_weights():
    config = config_of("qwen2")
    weights = whole_model(config)
    own = cut(weights, local_shards(config, Coordinates(tensor_rank=1, tensor_size=2)))
    q, k, v = (weights[f"model.layers.0.self_attn.{kind}_proj.bias"] for kind in "qkv")
    groups = torch.cat([q.view(4, 4), k.view(4, 2), v.view(4, 2)], 1).reshape(-1)
    assert torch.equal(own[0, "decoder.layers.0.self_attention.linear_qkv.bias"], groups.chunk(2)[1])


def test_interleaved_stages_hold_every_second_virtual_stage():
    config = config_of("llama")
    stage = replace(Coordinates(pipeline_size=2, chunks=2), pipeline_rank=1)
    norms = [shard for shard in local_shards(config, stage) if shard.name.endswith("input_layernorm.weight")]
    assert [(shard.name, shard.chunk, shard.parameter) for shard in norms] == [
        ("model.layers.1.input_layernorm.weight", 0, "decoder.layers.0.input_layernorm.weight"),
        ("model.layers.3.input_layernorm.weight", 1, "decoder.layers.0.input_layernorm.weight"),
    ]
    assert {shard.parameter for shard in local_shards(config, stage) if "layers" not in shard.parameter} == {
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }


def test_virtual_stages_of_unequal_size():
    config = config_of("llama")
    coordinates = Coordinates(pipeline_size=2, layers=(1, 3))
    found = [{shard.parameter for shard in local_shards(config, one)} for one in places(coordinates)]
    assert [sum(name.endswith("input_layernorm.weight") for name in names) for names in found] == [1, 3]
    with pytest.raises(ConfigError, match=r"layer counts \(2, 3\) do not split 4 layers"):
        local_shards(config, replace(coordinates, layers=(2, 3)))


@pytest.mark.parametrize(
    ("coordinates", "message"),
    [
        (Coordinates(pipeline_size=3), "4 layers are not divisible by 3 virtual stages"),
        (Coordinates(tensor_size=5), "is not divisible by policy.parallelism.tensor=5"),
        (Coordinates(expert_size=3), "4 experts are not divisible by policy.parallelism.expert=3"),
        (Coordinates(padded_vocabulary=40), "41 tokens cannot be padded to 40 rows"),
    ],
)
def test_indivisible_sizes_are_rejected(coordinates, message):
    with pytest.raises(ConfigError, match=message):
        local_shards(config_of("experts"), coordinates)


def test_other_models_are_rejected():
    from transformers import GPT2Config

    with pytest.raises(NotSupported, match="cannot convert the weights of a 'gpt2' model"):
        weight_shapes(GPT2Config())


# -- flat ranges ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(tensor=st.sampled_from([1, 2, 4]), cuts=st.lists(st.integers(0, 600), max_size=4))
def test_ranges_of_a_fused_matrix_cover_its_weights(tensor, cuts):
    """Whatever the sharding, every element is covered once, by a view of its source."""
    config = config_of("qwen3")
    weights = whole_model(config)
    joined = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}
    for rank in range(tensor):
        shards = local_shards(config, Coordinates(tensor_rank=rank, tensor_size=tensor))
        for (chunk, name), parameter in cut(weights, shards).items():
            ends = sorted({0, parameter.numel(), *(end % (parameter.numel() + 1) for end in cuts)})
            for start, stop in itertools.pairwise(ends):
                flat = parameter.view(-1)[start:stop].clone()
                for shard in (one for one in shards if (one.chunk, one.parameter) == (chunk, name)):
                    stored = tuple(parameter.shape)
                    for part in flat_shards(shard.name, shard.shape, flat, start, stored, shard.regions):
                        assert part.local.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
                        assert joined[shard.name][part.where].isnan().all() or "norm" in shard.name
                        joined[shard.name][part.where] = part.local
    assert all(torch.equal(joined[name], weight) for name, weight in weights.items())


@settings(max_examples=100, deadline=None)
@given(
    ranks=st.integers(1, 5),
    share=st.integers(1, 9),
    offset=st.integers(0, 50),
    ends=st.tuples(st.integers(0, 100), st.integers(0, 100)),
)
def test_shares_of_a_bucket_fill_a_parameter(ranks, share, offset, ends):
    size = ranks * share
    start, stop = sorted(end % (size + 1) for end in ends)
    found = list(flat_shards_of(offset + start, offset + stop, (offset, offset + size), ranks))
    assert [number for one in found for number in range(one.start, one.stop)] == list(range(stop - start))
    assert all(one.start + start >= one.rank * share and one.stop + start <= (one.rank + 1) * share for one in found)
