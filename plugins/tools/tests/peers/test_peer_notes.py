"""Notes about a pasted configuration as a whole, and values of other frameworks that are more than one word."""

from __future__ import annotations

from typing import Any

import pytest
from probe_hints import MINIMAL, error_of

from rlframework.base.errors import ConfigError
from rlframework.plugins.configure import load_config

TRL_BATCHES = (
    "TRL's batches are `policy.train_global_batch_size: %d` and `algorithm.prompts_per_step: %d`, each times the"
)
STEPS_COUNT = "TRL ends at max_steps where num_train_epochs is given too: set only `algorithm.num_steps`."
MANY = [f"zz{index}=1" for index in range(45)]
WARMUP = "{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 50}}"
CONSTANT = "{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}"
COSINE = "{name: torch.optim.lr_scheduler.CosineAnnealingLR}"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (
            ["num_generations=8", "scale_rewards=group"],
            "TRL (normalization, which groups count), add `algorithm.preset",
        ),
        (["policy.dtensor_cfg={enabled: true}"], "of NeMo-RL (leave-one-out baseline, "),
        (["actor_rollout_ref={rollout: {n: 8}}"], "of verl (which groups count, bounds of the loss), add"),
        (["num_generations=8", *MANY], "add `algorithm.preset: trl`"),
        (
            ["algorithm.name=ppo", "critic={}", "policy.dtensor_cfg={enabled: true}"],  # not with that of the critic
            "For the formulas of NeMo-RL, add `algorithm.preset: nemo_rl`.",
        ),
        (
            ["algorithm.name=sft", "per_device_train_batch_size=8", "weight_decay=0.1"],
            "TRL's defaults, which are others here: `policy.scheduler.name: linear`, `policy.precision: bfloat16` (",
        ),
        (["per_device_train_batch_size=8"], TRL_BATCHES % (8, 1)),
        (
            ["per_device_train_batch_size=4", "gradient_accumulation_steps=4", "num_generations=4"],
            TRL_BATCHES % (16, 4),
        ),
        (
            ["per_device_train_batch_size=8", "gradient_accumulation_steps=2", "steps_per_generation=8"],
            TRL_BATCHES % (16, 8),  # TRL's generation batch, of answers, by those of a prompt
        ),
        (["max_steps=100", "num_train_epochs=3"], STEPS_COUNT),
        (
            [f"policy.scheduler=[{WARMUP}, {CONSTANT}, {{milestones: [50]}}]"],
            "write `policy.scheduler: {name: constant, warmup_steps: 50}`.",
        ),
        ([f"policy.scheduler=[{WARMUP}, {COSINE}]"], "write `policy.scheduler: {name: cosine, warmup_steps: 50}`."),
        ([f"policy.scheduler=[{COSINE}]"], "write `policy.scheduler: {name: cosine}`."),
        (["policy.scheduler=[{name: LinearLR}, 1]"], "write `policy.scheduler: {name: constant, warmup_steps: N}`."),
        (
            ["algorithm.name=ppo", f"critic.scheduler=[{WARMUP}]"],
            "write `critic.scheduler: {name: constant, warmup_steps: 50}`.",
        ),
    ],
)
def test_a_note_is_told_once(written: list[str], told: str) -> None:
    assert error_of(*written).count(told) == 1


PRESET = "For the formulas of"
BATCHES = "TRL's batches are"


@pytest.mark.parametrize(
    ("written", "note"),
    [
        pytest.param(["algorithm.preset=trl", "num_generations=8"], PRESET, id="the preset is set"),
        pytest.param(["algorithm={name: sft, num_generations: 8}"], PRESET, id="an algorithm without presets"),
        pytest.param(["algorithm.name=dr_grpo", "loss_fn={ratio_clip_min: 0.2}"], PRESET, id="of another algorithm"),
        pytest.param(
            ["grpo={normalize_rewards: true, use_leave_one_out_baseline: false}"], PRESET, id="another baseline"
        ),
        pytest.param(["algorithm.adv_estimator=grpo"], PRESET, id="a hint for the value"),
        pytest.param(["policy.nothing=1"], PRESET, id="no other framework"),
        pytest.param(["per_device_train_batch_size=2"], BATCHES, id="a part of a group"),
        pytest.param(["per_device_train_batch_size=8", "generation_batch_size=64"], BATCHES, id="of all devices"),
        pytest.param(["per_device_train_batch_size=true", "num_generations=1"], BATCHES, id="no number"),
        pytest.param(["algorithm={name: sft, per_device_train_batch_size: 8}"], BATCHES, id="no rollouts"),
        pytest.param(["max_steps=-1", "num_train_epochs=3"], STEPS_COUNT, id="no end by steps"),
    ],
)
def test_no_note_is_told_that_does_not_fit(written: list[str], note: str) -> None:
    assert note not in error_of(*written)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (
            {"num_generations": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
            (
                "For the formulas of TRL (normalization, which groups count), add `algorithm.name: grpo` and "
                "`algorithm.preset: trl`. TRL's defaults, not set by it: `policy.optimizer.weight_decay: 0.0`, "
                "`policy.scheduler.name: linear`, `policy.precision: bfloat16` (the default here on a GPU alone). "
                "TRL's batches are `policy.train_global_batch_size: 16` and `algorithm.prompts_per_step: 2`, each "
                "times the number of devices."
            ),
        ),
        (
            {"per_device_train_batch_size": 8, "algorithm": {"num_generations": 4}},
            "TRL's batches are `policy.train_global_batch_size: 8` and `algorithm.prompts_per_step: 2`, each",
        ),
        (
            {"num_generations": 8, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "fp16": True},
            "add `algorithm.name: grpo` and `algorithm.preset: trl`.",
        ),
        ({"num_generations": 8, "loss_type": "cispo"}, "add `algorithm.name: cispo` and `algorithm.preset: trl`."),
        (
            {"actor_rollout_ref": {"n": 8}, "algorithm": {"adv_estimator": "gae"}},
            "For the formulas of verl, add `algorithm.name: ppo` and `algorithm.preset: verl`.",
        ),
        (
            {"grpo": {"num_prompts_per_step": 2, "adv_estimator": {"name": "grpo"}}},
            "add `algorithm.name: grpo` and `algorithm.preset: nemo_rl`.",
        ),
    ],
    ids=["trl", "trl-within-algorithm", "trl-defaults-given", "trl-cispo", "verl-ppo", "nemo-rl"],
)
def test_a_preset_is_told_with_a_missing_name(written: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({key: value for key, value in MINIMAL.items() if key != "algorithm"} | written)
    assert told in str(error.value)
    many = {f"zz{index}": 1 for index in range(45)}
    with pytest.raises(ConfigError) as error:
        load_config({"policy": MINIMAL["policy"]} | written | many)
    assert told in str(error.value)


@pytest.mark.parametrize(
    "written",
    [
        {"per_device_train_batch_size": 2, "num_train_epochs": 1, "packing": True},
        {"actor_rollout_ref": {"n": 8}, "algorithm": {"adv_estimator": "remax"}},
        {"zz": 1},
    ],
)
def test_no_algorithm_is_named_that_the_keys_do_not_say(written: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({key: value for key, value in MINIMAL.items() if key != "algorithm"} | written)
    assert "add `algorithm.name" not in str(error.value)


@pytest.mark.parametrize(
    ("metric", "meant"),
    [
        ("val:reward", "reward"),
        ("Accuracy", "accuracy"),
    ],
)
def test_a_metric_that_no_run_has_is_an_error(metric: str, meant: str) -> None:
    message = error_of(f"checkpoints.metric={metric!r}")
    assert "`checkpoints.metric`: must be a metric as named in metrics.jsonl, such as validation/reward" in message
    assert message.endswith(f"Set it to validation/{meant}.")
    assert f"`checkpoints.metric`. Set it to validation/{meant}." in error_of(f"metric_name={metric!r}")
    message = error_of(f"algorithm.early_stopping.metric={metric!r}", "algorithm.validation.every=5")
    assert "`algorithm.early_stopping.metric`: must be a metric as named in metrics.jsonl" in message
    assert message.endswith(f"Set it to validation/{meant}.")


STOPPING = "algorithm.early_stopping.patience=%d"


def test_early_stopping_needs_validations_within_the_run() -> None:
    """Two measurements without an improvement follow a first one: three before the last step."""
    for steps, every, such_as in ((7, 0, 2), (7, 7, 2), (5, 5, 1), (200, 0, 10)):
        keys = [STOPPING % 2, f"algorithm.num_steps={steps}"]
        message = error_of(*keys, f"algorithm.validation.every={every}")
        assert f"`algorithm.early_stopping`: never ends the run, because algorithm.validation.every={every}" in message
        assert f"Set algorithm.validation.every, such as {such_as}. Or set algorithm.early_stopping" in message
        assert message.endswith("or remove it: ~algorithm.early_stopping.")
        assert load_config(MINIMAL, [*keys, f"algorithm.validation.every={such_as}"])
    assert load_config(MINIMAL, [STOPPING % 2, "algorithm.num_steps=7", "algorithm.early_stopping.metric=train/reward"])


def test_early_stopping_needs_more_validations_than_its_patience() -> None:
    keys = ["algorithm.num_steps=10", "algorithm.validation.every=3"]
    message = error_of(STOPPING % 3, *keys)
    assert "because algorithm.early_stopping.patience=3 needs 4 validations before its last step, and" in message
    assert "algorithm.validation.every=3 gives 3" in message
    assert "Set algorithm.validation.every, such as 2." in message
    assert load_config(MINIMAL, [STOPPING % 2, *keys])
    message = error_of(STOPPING % 9, *keys)
    assert "Set algorithm.num_steps above 10, or lower algorithm.early_stopping.patience to at most 8, with" in message
    assert load_config(MINIMAL, [STOPPING % 8, "algorithm.num_steps=10", "algorithm.validation.every=1"])


def test_a_metric_of_several_attempts_needs_them() -> None:
    attempts = ["algorithm.validation.attempts=4", "algorithm.validation.temperature=1"]
    message = error_of("checkpoints.metric=validation/avg@8", *attempts)
    assert "`checkpoints.metric`: needs algorithm.validation.attempts=8; it is 4" in message
    assert "needs algorithm.validation.attempts=2; it is 4" in error_of(
        "checkpoints.metric=validation/avg@2", *attempts
    )
    stopping = "algorithm.early_stopping={metric: validation/pass@8_low}"
    message = error_of(stopping, "algorithm.validation.every=1", *attempts)
    assert "`algorithm.early_stopping.metric`: needs algorithm.validation.attempts=8; it is 4" in message
    assert load_config(MINIMAL, ["checkpoints.metric=validation/pass@4", *attempts])
