"""Configurations that the megatron backend rejects, by key, before a process starts.

And that this is all that workers refuse, as far as the configuration and the model's config.json tell it.
"""

from __future__ import annotations

import json

import pytest
from pydantic import create_model

from rlframework.base.errors import ConfigError, NotSupported
from rlframework.config.policy import ParallelismConfig, PolicyConfig
from rlframework.config.sections import AlgorithmConfig, EnvironmentConfig, RunConfig
from rlframework_megatron import config as megatron_config
from rlframework_megatron.config import MegatronConfig
from rlframework_megatron.coordinates import Coordinates
from rlframework_megatron.names import local_shards
from rlframework_megatron.parallel import Sizes
from rlframework_megatron.settings import require_experts, require_same_function

Policy = create_model("Policy", __base__=PolicyConfig, megatron=(MegatronConfig, MegatronConfig()))
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA = {"model_type": "llama", **SIZES}
QWEN2 = {"model_type": "qwen2", **SIZES}
QWEN3 = {"model_type": "qwen3", **SIZES, "head_dim": 8}
MIXTURE = {
    "model_type": "qwen3_moe",
    **SIZES,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.fixture
def problems(tmp_path):
    """`problems(model, workers, device, **policy)`: what `check` finds; `model` is config.json, None: there is none."""

    def found(model=LLAMA, workers=1, device="cpu", **policy):
        if model is not None:
            (tmp_path / "config.json").write_text(json.dumps(model))
        config = RunConfig(
            algorithm=AlgorithmConfig(name="a"),
            worker_group={"num_workers": workers},
            policy=Policy.model_validate({"model_name": str(tmp_path), **policy}),
            environment=EnvironmentConfig(name="e"),
        )
        return megatron_config.check(config, device)

    return found


@pytest.fixture
def read(tmp_path):
    """`read(model)`: config.json as transformers reads it, which is what workers look at."""

    def found(model):
        from transformers import AutoConfig

        (tmp_path / "config.json").write_text(json.dumps(model))
        return AutoConfig.from_pretrained(tmp_path)

    return found


GOOD = [
    (LLAMA, 1, {}),
    (QWEN2, 2, {"parallelism": {"tensor": 2, "sequence": True}}),
    (QWEN3, 4, {"parallelism": {"tensor": 2, "context": 2}}),
    (LLAMA, 4, {"parallelism": {"pipeline": 4}}),
    (LLAMA, 2, {"parallelism": {"pipeline": 2}, "megatron": {"virtual_pipeline": 2}}),
    (LLAMA, 2, {"megatron": OVERLAPPED, "precision": "bfloat16"}),
    (MIXTURE, 2, {"parallelism": {"expert": 2}, "router_aux_loss_coef": 0.1}),
    (MIXTURE, 4, {"parallelism": {"expert": 2, "pipeline": 2}}),
    (MIXTURE, 4, {"parallelism": {"expert": 2, "context": 2}}),
    (MIXTURE, 2, {"parallelism": {"tensor": 2, "sequence": True}}),
    (MIXTURE, 4, {"parallelism": {"tensor": 2, "sequence": True, "expert": 2}}),
    (MIXTURE, 2, {"lora": {}}),
    (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 1, {}),
    (QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, 1, {}),
    (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 1, {}),
    (LLAMA | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}, 1, {}),
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("model", "workers", "policy"), GOOD, ids=range(len(GOOD)))
def test_supported_configurations_pass_the_check_and_the_workers(problems, read, model, workers, policy, device):
    assert problems(model, workers, device, **policy) == []
    built = read(model)
    require_same_function(built)
    parallelism = ParallelismConfig(**policy.get("parallelism", {}))
    virtual = policy.get("megatron", {}).get("virtual_pipeline", 1)
    sizes = Sizes.of(workers, parallelism, virtual)
    local_shards(built, coordinates(sizes))


def coordinates(sizes):
    """The first rank's."""
    return Coordinates(
        tensor_size=sizes.tensor, pipeline_size=sizes.pipeline, chunks=sizes.virtual, expert_size=sizes.expert
    )


LAYOUTS = [
    (LLAMA, 4, {"tensor": 4}, {}, "policy.parallelism.tensor", "2 key-value heads", "Choose a divisor."),
    (
        LLAMA | {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3},
        2,
        {"tensor": 2},
        {},
        "policy.parallelism.tensor",
        "3 attention heads",
        "Choose a divisor.",
    ),
    (
        LLAMA | {"intermediate_size": 63},
        2,
        {"tensor": 2},
        {},
        "policy.parallelism.tensor",
        "63 units of the MLP",
        "Choose a divisor.",
    ),
    (
        LLAMA,
        3,
        {"pipeline": 3},
        {},
        "policy.parallelism.pipeline",
        "4 layers, not divisible by 3 stages of 1 model chunks",
        "Choose numbers whose product divides 4.",
    ),
    (
        LLAMA,
        2,
        {"pipeline": 2},
        {"virtual_pipeline": 3},
        "policy.megatron.virtual_pipeline",
        "4 layers, not divisible by 2 stages of 3 model chunks",
        "Choose numbers whose product divides 4.",
    ),
    (
        LLAMA,
        1,
        {},
        {"virtual_pipeline": 2},
        "policy.megatron.virtual_pipeline",
        "2 model chunks per stage need a pipeline, but policy.parallelism.pipeline is 1.",
        "Set it to 1, or policy.parallelism.pipeline to 2 or more.",
    ),
    (
        LLAMA,
        1,
        {"sequence": True},
        {},
        "policy.parallelism.sequence",
        "policy.parallelism.tensor is 1.",
        "Set it to false, or increase policy.parallelism.tensor.",
    ),
    (LLAMA, 2, {"expert": 2}, {}, "policy.parallelism.expert", "'llama' model has no experts", "Remove it."),
    (
        MIXTURE | {"num_experts": 3},
        2,
        {"expert": 2},
        {},
        "policy.parallelism.expert",
        "3 experts, not divisible by 2",
        "Choose a divisor.",
    ),
    (MIXTURE, 3, {"expert": 2}, {}, "policy.parallelism.expert", "3 data-parallel workers", "divisor, or 1."),
    (
        LLAMA,
        2,
        {},
        {"overlap_param_gather": True},
        "policy.megatron.overlap_param_gather",
        "policy.megatron.overlap_grad_reduce",
        "Set both to true, or this to false.",
    ),
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("model", "workers", "parallelism", "section", "key", "says", "hint"),
    LAYOUTS,
    ids=[f"{row[4].rpartition('.')[2]}-{number}" for number, row in enumerate(LAYOUTS)],
)
def test_impossible_layouts_are_rejected(problems, model, workers, parallelism, section, key, says, hint, device):
    (found,) = problems(model, workers, device, parallelism=parallelism, megatron=section)
    assert found.key == key
    assert says in found.message
    assert found.hint.endswith(hint)
    assert not found.undeclared


@pytest.mark.parametrize(
    ("section", "missing"),
    [({"distributed_optimizer": True}, True), ({"overlap_grad_reduce": True}, True), ({}, False)],
)
def test_overlap_param_gather_requires_both_other_options(problems, section, missing):
    found = problems(workers=2, megatron={"overlap_param_gather": missing, **section})
    assert [problem.key for problem in found] == ["policy.megatron.overlap_param_gather"] * missing


def test_parameter_offload_is_rejected_on_a_gpu_and_ignored_on_a_cpu(problems):
    offload = {"parameters": True, "optimizer": True}
    assert [problem.key for problem in problems(device="cuda", offload=offload)] == ["policy.offload.parameters"]
    assert problems(device="cuda", offload={"optimizer": True}) == []
    assert problems(device="cpu", offload=offload) == []


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"parallelism": {"expert": 2}}, "policy.parallelism.expert"),
        ({"megatron": {"transformer_engine": True}}, "policy.megatron.transformer_engine"),
        ({"head": "score"}, "policy.lora"),
        ({"lora": {"part": "vision"}}, "policy.lora.part"),
    ],
)
def test_what_does_not_combine_with_adapters_is_rejected(problems, keys, key):
    (found,) = problems(MIXTURE, workers=2, **{"lora": {}, **keys})
    assert found.key == key


def test_the_load_balancing_loss_needs_a_model_with_experts(problems):
    (found,) = problems(router_aux_loss_coef=0.1)
    assert found.key == "policy.router_aux_loss_coef"
    assert "no experts" in found.message


@pytest.mark.parametrize(
    ("workers", "axes", "coefficient", "key", "says"),
    [
        (2, {"tensor": 2}, 0.0, "policy.parallelism.sequence", "mixtures of experts"),
        (2, {"context": 2}, 0.1, "policy.router_aux_loss_coef", "whole layers and sequences"),
        (2, {"pipeline": 2}, 0.1, "policy.router_aux_loss_coef", "whole layers and sequences"),
    ],
)
def test_unsupported_axes_for_a_mixture_of_experts(problems, read, workers, axes, coefficient, key, says):
    found = problems(MIXTURE, workers=workers, parallelism=axes, router_aux_loss_coef=coefficient)
    assert [problem.key for problem in found] == [key]
    assert says in found[0].message
    with pytest.raises(NotSupported):
        require_experts(read(MIXTURE), Sizes.of(workers, ParallelismConfig(**axes)), router_loss=coefficient > 0)


def test_a_model_that_is_not_a_local_directory_is_checked_by_the_workers(problems, tmp_path):
    assert problems(None, 4, parallelism={"tensor": 4}) == []
    (tmp_path / "config.json").write_text("[1]")
    assert problems(None, 4, parallelism={"tensor": 4}) == []


SPLITS = [row for row in LAYOUTS if "divisible" in row[5] or "divisor" in row[6]]


@pytest.mark.parametrize(("model", "workers", "parallelism", "section"), [row[:4] for row in SPLITS])
def test_workers_reject_the_same_splits(read, model, workers, parallelism, section):
    """Workers name the same configuration keys if the model was not available for the early check."""
    built = read(model)

    def worker():
        sizes = Sizes.of(workers, ParallelismConfig(**parallelism), section.get("virtual_pipeline", 1))
        if (found := megatron_config.indivisible(built.to_dict(), sizes.tensor)) is not None:
            raise ConfigError(found)
        local_shards(built, coordinates(sizes))

    with pytest.raises(ConfigError, match=r"policy\.parallelism\."):
        worker()


MODELS = [
    ({"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4}, "gpt2"),
    ({"model_type": "gemma", **SIZES, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"model_type": "qwen2_vl"}, "qwen2_vl"),
]


@pytest.mark.parametrize(("model", "says"), MODELS, ids=[f"{row[1]}-{number}" for number, row in enumerate(MODELS)])
def test_models_that_workers_reject_are_rejected_early(problems, read, model, says):
    with pytest.raises(NotSupported, match=r"policy\.backend to dtensor"):
        require_same_function(read(model))
    (found,) = problems(model)
    assert found.key == "policy.model_name"
    assert says in found.message
    assert found.hint == "Set policy.backend to dtensor."
