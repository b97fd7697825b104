"""The section `policy.deepspeed`: DeepSpeed's own keys, from a file too, and what DeepSpeed gets of them."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from rlframework.base.errors import ConfigError
from rlframework.config.policy import OffloadConfig, PolicyConfig
from rlframework.plugins.configure import config_yaml, load_config
from rlframework.plugins.manager import create_manager
from rlframework_deepspeed.config import OWN, OWNED, DeepSpeedConfig, Keys, engine_config
from rlframework_deepspeed.device_defaults import device_defaults
from rlframework_deepspeed.neutral_keys import NEUTRAL
from rlframework_deepspeed.rejected_keys import REJECTED

HUGGING_FACE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 12},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "offload_param": {"device": "none"},
    },
    "wandb": {"enabled": False},
}
"""As people have them for transformers."""


def policy(**keys):
    return PolicyConfig.model_validate({"model_name": "m", **keys})


def section(**keys):
    return DeepSpeedConfig.model_validate(keys)


@pytest.fixture
def file(tmp_path):
    def write(values):
        path = tmp_path / "ds_config.json"
        path.write_text(values if isinstance(values, str) else json.dumps(values))
        return str(path)

    return write


@pytest.fixture
def run(monkeypatch):
    monkeypatch.delenv("RLFRAMEWORK_DISABLE_PLUGINS", raising=False)
    manager = create_manager(["rlframework_deepspeed.plugin"])

    def load(*overrides, **keys):
        parts = {"algorithm": {"name": "sft"}, "environment": {"name": "addition"}, "device": "cpu"}
        model = {"model_name": "m", "backend": "deepspeed", "deepspeed": keys}
        return load_config({**parts, "policy": model}, overrides, manager=manager)

    load.manager = manager
    return load


def test_the_framework_owns_batches_accumulation_clipping_and_the_optimizer():
    made = engine_config(policy(), section(gradient_clipping=1.0, train_batch_size=64), device="cpu")
    assert made["train_micro_batch_size_per_gpu"] == made["gradient_accumulation_steps"] == 1
    assert made["gradient_clipping"] == 0.0
    assert not {"optimizer", "scheduler", "train_batch_size", "tensor_parallel"} & made.keys()
    assert made["zero_force_ds_cpu_optimizer"] is False
    assert made["zero_allow_untested_optimizer"] is True


def test_what_is_not_given_is_left_to_deepspeed():
    assert engine_config(policy(), section(), device="cpu")["zero_optimization"] == {"stage": 2}
    given = section(zero_optimization={"stage": 1, "reduce_bucket_size": 5e8, "overlap_comm": False})
    assert engine_config(policy(), given, device="cuda")["zero_optimization"] == {
        "stage": 1,
        "reduce_bucket_size": 500_000_000,
        "overlap_comm": False,
    }


def test_stage_0_has_no_keys_of_splitting():
    given = section(zero_optimization={"stage": 0, "reduce_bucket_size": 7, "offload_optimizer": {"device": "cpu"}})
    assert engine_config(policy(), given, device="cuda")["zero_optimization"] == {"stage": 0}


def test_other_keys_are_passed_on():
    given = section(communication_data_type="fp32", wall_clock_breakdown=True, aio={"block_size": 1}, wandb={})
    made = engine_config(policy(), given, device="cpu")
    assert (made["communication_data_type"], made["wall_clock_breakdown"], made["aio"]) == (
        "fp32",
        True,
        {"block_size": 1},
    )
    assert "wandb" not in made


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_precision_is_that_of_the_policy(precision):
    made = engine_config(policy(precision=precision), section(fp16={"initial_scale_power": 12}), device="cuda")
    assert made["bf16"] == {"enabled": precision == "bfloat16"}
    scaled = {"initial_scale_power": 12, "enabled": True}
    assert made["fp16"] == (scaled if precision == "float16" else {"enabled": False})


def test_tensor_parallelism_is_autotp():
    given = section(tensor_parallel={"preset_model": "llama"})
    made = engine_config(policy(parallelism={"tensor": 2}), given, device="cpu")
    assert made["tensor_parallel"] == {"preset_model": "llama", "autotp_size": 2}
    assert "tensor_parallel" not in engine_config(policy(), given, device="cpu")


@pytest.mark.parametrize(
    ("offload", "own", "device", "made"),
    [
        ({"optimizer": True}, {}, "cuda", {"offload_optimizer": {"device": "cpu"}}),
        ({"optimizer": True}, {}, "cpu", {}),
        (
            {"parameters": True},
            {},
            "cuda",
            {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
        ),
        (
            {"parameters": True},
            {"offload_param": {"pin_memory": False}, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}},
            "cuda",
            {
                "offload_param": {"device": "cpu", "pin_memory": False},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
            },
        ),
        ({}, {"offload_optimizer": {"device": "cpu", "pin_memory": True}}, "cpu", {}),
        ({}, {"offload_optimizer": {"pin_memory": True}}, "cuda", {}),
    ],
)
def test_offload_is_by_the_neutral_keys_and_by_deepspeeds(offload, own, device, made):
    given = section(zero_optimization={"stage": 3, **own})
    keys = engine_config(policy(offload=offload), given, device=device)["zero_optimization"]
    assert keys == {"stage": 3, **made}


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_as_people_have_it_for_transformers_is_taken(run, file):
    config = run(config=file(HUGGING_FACE))
    made = engine_config(config.policy, config.policy.deepspeed, device="cpu")
    assert made["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 10**9,
        "stage3_max_live_parameters": 10**9,
    }
    assert made["fp16"] == made["bf16"] == {"enabled": False}
    assert "wandb" not in made


def test_keys_of_the_section_win_over_those_of_the_file(run, file):
    path = file({"zero_optimization": {"stage": 3, "overlap_comm": True}, "steps_per_print": 10})
    found = run("policy.deepspeed.zero_optimization.stage=1", config=path).policy.deepspeed
    assert (found.zero_optimization.stage, found.zero_optimization.overlap_comm, found.steps_per_print) == (1, True, 10)


def test_a_file_without_a_stage_is_of_stage_0_as_deepspeed_takes_it(run, file):
    assert run(config=file({"steps_per_print": 10})).policy.deepspeed.zero_optimization.stage == 0
    assert run().policy.deepspeed.zero_optimization.stage == 2


@pytest.mark.slow
def test_the_resolved_configuration_needs_the_file_no_more(run, file, tmp_path):
    config = run(config=file(HUGGING_FACE))
    (tmp_path / "ds_config.json").unlink()
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(config_yaml(config))
    assert load_config(resolved, manager=run.manager) == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not a JSON file of DeepSpeed's: Expecting property name"),
        ("[]", "must contain an object with DeepSpeed's keys, not a list"),
        ('{"zero_optimization": {"stage": 1}, "zero_optimization": {}}', "duplicate key 'zero_optimization'"),
        ('{"zero_optimization": {"stage": 7}}', "zero_optimization.stage: Input should be 0, 1, 2 or 3"),
        ('{"config": "other.json"}', "config is not a DeepSpeed key"),
        ('{"sequence_exchange": "ulysses"}', "sequence_exchange is not a DeepSpeed key"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_what_is_wrong(run, file, text, said):
    path = file(text)
    with pytest.raises(ConfigError, match=r"ds_config\.json") as error:
        run(config=path)
    assert said in str(error.value)


def test_a_file_that_is_not_there_is_told(run):
    with pytest.raises(ConfigError, match=r"config: none\.json cannot be read: No such file or directory"):
        run(config="none.json")
    with pytest.raises(ConfigError, match="must be the name of a JSON file, given 3"):
        run(config=3)


def test_auto_is_as_if_it_were_not_there_but_where_it_means_something():
    assert section(attention="auto", gradient_clipping="auto", zero_optimization={"stage": "auto"}) == section()


def test_values_are_checked():
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        section(zero_optimization={"reduce_bucket_size": -1})
    with pytest.raises(ValidationError, match="Input should be 'none', 'cpu' or 'nvme'"):
        section(zero_optimization={"offload_param": {"device": "disk"}})


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("zero_optimization.reduce_buckt_size=1", "zero_optimization.reduce_buckt_size", "reduce_bucket_size`"),
        ("step_per_print=1", "step_per_print", "steps_per_print`"),
        ("zero_optimization.offload_param.nvme_pth=x", "zero_optimization.offload_param.nvme_pth", "nvme_path`"),
    ],
)
def test_a_key_that_nobody_knows_is_an_error_with_the_nearest(run, file, override, key, hint):
    with pytest.raises(ConfigError) as error:
        run(f"policy.deepspeed.{override}")
    assert f"`policy.deepspeed.{key}`" in str(error.value)
    assert hint in str(error.value)


def test_a_key_of_a_file_that_nobody_knows_is_an_error_that_names_the_file(run, file):
    with pytest.raises(ConfigError, match="neither DeepSpeed nor this backend has such a key") as error:
        run(config=file({"zero_optimization": {"stag": 1}}))
    assert "ds_config.json: zero_optimization.stag:" in str(error.value)


# -- in step with DeepSpeed --------------------------------------------------------------------------------------------


def names_of(model):
    return {info.alias or name for name, info in model.model_fields.items()}


@pytest.fixture(scope="module")
def theirs():
    """DeepSpeed's own models of its sections."""
    from rlframework_deepspeed.process_state import quiet

    with quiet():
        from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
        from deepspeed.runtime.zero.offload_config import (
            DeepSpeedZeroOffloadOptimizerConfig,
            DeepSpeedZeroOffloadParamConfig,
        )
    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
    }


def ours(place):
    from rlframework.config.hints import models_in

    model = DeepSpeedConfig
    for name in place.split("."):
        model = models_in(model.model_fields[name].annotation)[0]
    assert issubclass(model, Keys)
    assert model.place == place
    return model


@pytest.mark.parametrize(
    "place",
    [
        "zero_optimization",
        "zero_optimization.offload_param",
        "zero_optimization.offload_optimizer",
        "bf16",
        "fp16",
    ],
)
def test_each_key_of_deepspeeds_is_taken_or_refused_with_a_reason(theirs, place):
    refused = REJECTED.get(place, {}).keys()
    gone = {key for key in refused if REJECTED[place][key].startswith("DeepSpeed has removed it")}
    assert names_of(theirs[place]) == names_of(ours(place)) | (refused - gone)
    assert not names_of(ours(place)) & refused


def test_each_top_level_key_that_deepspeed_has_removed_is_refused():
    from rlframework_deepspeed.process_state import quiet

    with quiet():
        from deepspeed.runtime import config
    assert config._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys() <= REJECTED[""].keys()
    assert config._REMOVED_ZERO_CONFIG_KEYS.keys() <= REJECTED["zero_optimization"].keys()
    assert not names_of(DeepSpeedConfig) & REJECTED[""].keys()
    assert names_of(DeepSpeedConfig) >= set(OWNED)
    assert set(OWNED) - set(OWN) == {place.partition(".")[0] for place in NEUTRAL}


# -- defaults on a GPU -------------------------------------------------------------------------------------------------


@pytest.fixture
def defaults(run):
    """`defaults(workers, precision, **section)`: the keys that a GPU gives values, and these."""

    def found(workers=2, precision="bfloat16", offload=False, **keys):
        config = run("worker_group.name=processes", f"worker_group.num_workers={workers}", **keys)
        changed = {"precision": precision, "offload": OffloadConfig(optimizer=offload)}
        config = config.model_copy(update={"policy": config.policy.model_copy(update=changed)})
        assert device_defaults(config, "cpu") == []
        given = device_defaults(config, "cuda")
        return {default.key.removeprefix("policy.deepspeed."): default.value for default in given}

    return found


FP32 = {"communication_data_type": "fp32"}
SUMS = {"data_types.grad_accum_dtype": "fp32"}
BUCKETS = {"zero_optimization.reduce_bucket_size": 100_000_000}
OVERLAP = {"zero_optimization.overlap_comm": True}


@pytest.mark.parametrize(
    ("stage", "expected"),
    [(0, FP32), (1, FP32 | BUCKETS | OVERLAP), (2, FP32 | SUMS | BUCKETS | OVERLAP), (3, FP32 | SUMS | BUCKETS)],
)
def test_a_gpu_sums_gradients_in_fp32_where_the_stage_can(defaults, stage, expected):
    assert defaults(zero_optimization={"stage": stage}) == expected


def test_defaults_of_a_gpu_that_would_not_help_are_not_given(defaults):
    assert defaults(workers=1) == SUMS | BUCKETS
    assert defaults(offload=True) == FP32 | SUMS | BUCKETS
    assert defaults(precision="float16") == FP32 | BUCKETS | OVERLAP


def test_keys_of_a_file_are_no_defaults(defaults, file):
    zero = {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 5}
    own = {"zero_optimization": zero, "communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}
    assert defaults(config=file(own)) == {}


def test_defaults_of_a_gpu_reach_deepspeed(run):
    config = run("device=cuda", "worker_group.name=processes", "worker_group.num_workers=2")
    made = engine_config(config.policy, config.policy.deepspeed, device="cuda")
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}
    assert made["communication_data_type"] == "fp32"
    assert made["zero_optimization"] == {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 100_000_000}


@pytest.mark.parametrize("stage", [0, 1])
def test_fp32_sums_of_stages_that_cannot_are_a_problem(run, stage):
    with pytest.raises(ConfigError, match=r"data_types\.grad_accum_dtype"):
        run("policy.precision=bfloat16", zero_optimization={"stage": stage}, data_types={"grad_accum_dtype": "fp32"})
