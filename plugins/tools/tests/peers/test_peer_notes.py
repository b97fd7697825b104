"""Notes about a pasted configuration as a whole, and values of other frameworks that are more than one word."""

from __future__ import annotations

from typing import Any

import pytest
from probe_hints import MINIMAL, error_of

from rlframework.base.errors import ConfigError
from rlframework.plugins.configure import load_config


@pytest.mark.parametrize(
    ("written", "preset"),
    [
        ("num_generations=8", "TRL (normalization, which groups count), add `algorithm.preset: trl`."),
        ("policy.dtensor_cfg={enabled: true}", "of NeMo-RL (leave-one-out baseline, "),
        ("loss_fn={ratio_clip_min: 0.2}", "add `algorithm.preset: nemo_rl`."),
        ("actor_rollout_ref={rollout: {n: 8}}", "of verl (which groups count, bounds of the loss), add"),
        ("algorithm={name: dpo, per_device_train_batch_size: 8}", "of TRL, add `algorithm.preset: trl`."),
    ],
)
def test_the_preset_of_another_framework_is_told_once(written: str, preset: str) -> None:
    message = error_of(written, "scale_rewards=group" if "num_gen" in written else "zzzz=1")
    assert message.count("For the formulas of") == 1
    assert preset in message


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
def test_the_preset_is_told_with_the_name_of_the_algorithm_where_there_is_none(
    written: dict[str, Any], told: str
) -> None:
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


def test_defaults_are_told_of_an_algorithm_without_presets() -> None:
    message = error_of("algorithm.name=sft", "per_device_train_batch_size=8", "weight_decay=0.1")
    assert message.endswith(
        "TRL's defaults, which are others here: `policy.scheduler.name: linear`, `policy.precision: bfloat16` (the "
        "default here on a GPU alone), `policy.optimizer.lr: 2.0e-5`."
    )


def test_a_hint_with_another_preset_does_not_hide_that_of_the_framework() -> None:
    message = error_of("grpo={num_prompts_per_step: 2, adv_estimator: grpo}")
    assert "verl's formulas are those with algorithm.preset=verl" in message
    assert "add `algorithm.preset: nemo_rl`." in message


def test_the_preset_is_told_with_a_problem_that_is_shown() -> None:
    """Not with that of the critic, which has the key of the policy, or after the most problems that are listed."""
    critic = error_of("algorithm.name=ppo", "critic={}", "policy.dtensor_cfg={enabled: true}")
    assert critic.endswith("For the formulas of NeMo-RL, add `algorithm.preset: nemo_rl`.")
    assert "add `algorithm.preset: trl`" in error_of("num_generations=8", *(f"zz{index}=1" for index in range(45)))


@pytest.mark.parametrize(
    "written",
    [
        ["algorithm.preset=trl", "num_generations=8"],
        ["algorithm={name: sft, num_generations: 8}"],
        ["algorithm.name=dr_grpo", "loss_fn={ratio_clip_min: 0.2}"],
        ["grpo={normalize_rewards: true, use_leave_one_out_baseline: false}"],
        ["algorithm.adv_estimator=grpo"],
        ["policy.nothing=1"],
    ],
    ids=["set", "no-presets", "not-of-this-algorithm", "another-baseline", "told-of-the-value", "no-peer"],
)
def test_no_preset_is_told_that_does_not_fit(written: list[str]) -> None:
    assert "For the formulas of" not in error_of(*written)


@pytest.mark.parametrize(
    ("keys", "batches"),
    [
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 8}, (16, 8)),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 4}, (16, 4)),
        ({"per_device_train_batch_size": 8}, (8, 1)),
    ],
)
def test_batches_of_trl_are_computed(keys: dict[str, int], batches: tuple[int, int]) -> None:
    """Rows of an optimizer step and prompts of a rollout: TRL's generation batch, of answers, by those of a prompt."""
    rows, prompts = batches
    assert (
        f"TRL's batches are `policy.train_global_batch_size: {rows}` and `algorithm.prompts_per_step: {prompts}`, each "
        "times the number of devices."
    ) in error_of(*(f"{key}={value}" for key, value in keys.items()))


@pytest.mark.parametrize(("steps", "told"), [(100, True), (-1, False)])
def test_of_two_ends_of_a_run_the_steps_count_as_in_trl(steps: int, told: bool) -> None:
    note = "TRL ends at max_steps where num_train_epochs is given too: set only `algorithm.num_steps`."
    assert (note in error_of(f"max_steps={steps}", "num_train_epochs=3")) == told


@pytest.mark.parametrize(
    "written",
    [
        ["per_device_train_batch_size=2"],
        ["per_device_train_batch_size=8", "generation_batch_size=64"],
        ["per_device_train_batch_size=true", "num_generations=1"],
        ["algorithm={name: sft, per_device_train_batch_size: 8}"],
    ],
    ids=["part-of-a-group", "of-all-devices", "no-number", "no-rollouts"],
)
def test_batches_of_trl_are_not_guessed(written: list[str]) -> None:
    assert "TRL's batches are" not in error_of(*written)


@pytest.mark.parametrize(
    ("metric", "meant"),
    [
        ("val_reward", "reward"),
        ("val:reward", "reward"),
        ("eval/loss", "loss"),
        ("Accuracy", "accuracy"),
        ("eval_rewards/accuracies", "accuracy"),
        ("rewards/margins", "margin"),
        ("eval_rewards/chosen", "chosen_reward"),
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


@pytest.mark.parametrize("metric", ["validation/reward", "train/own"])
def test_a_metric_of_any_kind_is_accepted(metric: str) -> None:
    assert load_config(MINIMAL, [f"checkpoints.metric={metric}"]).checkpoints.metric == metric


def test_torch_schedulers_are_translated() -> None:
    warmup = "{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 50}}"
    constant = "{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}"
    cosine = "{name: torch.optim.lr_scheduler.CosineAnnealingLR}"
    for written, ours in (
        (f"[{warmup}, {constant}, {{milestones: [50]}}]", "{name: constant, warmup_steps: 50}"),
        (f"[{warmup}, {cosine}]", "{name: cosine, warmup_steps: 50}"),
        (f"[{cosine}]", "{name: cosine}"),
        ("[{name: LinearLR}, 1]", "{name: constant, warmup_steps: N}"),
    ):
        assert f"write `policy.scheduler: {ours}`." in error_of(f"policy.scheduler={written}")
    critic = error_of("algorithm.name=ppo", f"critic.scheduler=[{warmup}]")
    assert "write `critic.scheduler: {name: constant, warmup_steps: 50}`." in critic
