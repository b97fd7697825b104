"""The loop of steps around parts that do nothing, and validation, whose metrics are calculated by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stub_engines import AnswersB

from rlframework import RunResult
from rlframework.algorithms import loop
from rlframework.algorithms.advantages import group_advantages
from rlframework.algorithms.loop import StepLoop, require_step_result
from rlframework.algorithms.validation import attempt_metrics, validate
from rlframework.base.errors import ConfigError, UserError
from rlframework.config.sections import GenerationConfig, ValidationConfig
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.environment import LARGEST_REWARD, Environment, Sample, Split, StepOutcome
from rlframework.rollout.seeds import row_seeds
from rlframework.rollout.single_turn import single_turns


class Graded(Environment):
    """Has these samples and outcomes."""

    def __init__(self, samples: list[Sample], outcomes: list[StepOutcome]) -> None:
        self._samples, self._outcomes = samples, outcomes

    def samples(self, split: Split) -> Sequence[Sample]:
        return self._samples

    def step(self, samples: Any, conversations: Any) -> list[StepOutcome]:
        return self._outcomes


def validated(accuracies: list[float], **settings: Any) -> tuple[dict[str, float], Any, list[str]]:
    """The metrics of a validation of two samples, what it asked for, and the ids of its records."""
    parts = parts_of([StepOutcome(value, metrics={"accuracy": value}) for value in accuracies], **settings)
    metrics, records = validate(parts, 1, set())
    return metrics, parts.generation.asked, [record.sample for record in records]


def parts_of(outcomes: list[StepOutcome], **settings: Any) -> Any:
    samples = [Sample(name, ({"role": "user", "content": "a"},), "b") for name in ("one", "two", "three")]
    section = ValidationConfig(samples=2, **settings)
    config = SimpleNamespace(
        seed=5,
        environment=SimpleNamespace(name="mine"),
        algorithm=SimpleNamespace(validation=section),
        generation=GenerationConfig(temperature=0.7),
        observers=SimpleNamespace(samples=8),
    )
    return SimpleNamespace(
        tokenizer=character_tokenizer("ab"),
        generation=AnswersB(),
        environment=Graded(samples, outcomes),
        config=config,
        images=None,
        timeline=None,
        models={},
    )


@pytest.mark.parametrize(
    ("rewards", "warned"), [((0.3, 0.95), True), ((0.3, 0.3), False), ((0.3, 1.0), False), ((0.3, 2.0), False)]
)
def test_rewards_that_are_never_right_are_warned_of_once(
    rewards: tuple[float, ...], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = {"accuracy": 0.0} if max(rewards) > 1 else {}  # then it is the environment's own
    parts, of_run = parts_of([StepOutcome(reward, metrics=metrics) for reward in rewards]), set[str]()
    for step in (1, 2):
        validate(parts, step, of_run)
    assert caplog.text.count("validation/accuracy is 0, and rewards are from 0.3 to 0.95") == warned
    assert len(caplog.records) == warned


def test_one_greedy_attempt_by_default() -> None:
    metrics, asked, records = validated([1.0, 0.0])
    assert asked == (0.0, row_seeds(5, 0, 2).tolist())
    assert records == ["one", "two"]
    assert metrics == {
        "validation/accuracy": 0.5,
        "validation/reward": 0.5,
        "validation/completion_length": 1.0,
        "validation/truncated_fraction": 0.0,
        "validation/samples": 2.0,
    }


def test_several_attempts_are_adjacent_and_sampled_with_seeds_of_their_own() -> None:
    metrics, asked, records = validated([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], attempts=4)
    assert asked == (0.7, row_seeds(5, 0, 8).tolist())
    assert records == ["one"] * 4 + ["two"] * 4
    assert (metrics["validation/samples"], metrics["validation/accuracy"]) == (2.0, 0.25)
    assert metrics["validation/avg@4"] == 0.25


@pytest.mark.parametrize(("attempts", "temperature"), [(1, 0.3), (2, 1.5)])
def test_the_temperature_of_validation(attempts: int, temperature: float) -> None:
    _, asked, _ = validated([0.0] * (2 * attempts), attempts=attempts, temperature=temperature)
    assert asked[0] == temperature


def test_metrics_of_attempts_by_hand() -> None:
    """Prompts with 2 and 0 of 4 right.

    pass@2 of the first is 1 - C(2, 2) / C(4, 2) = 5/6. Bootstraps of two prompts are from one value to the other, as
    each mean of equal draws has a quarter. pass@4, 1 of 2, has Wilson's interval: z^2 = 3.841459, half
    1.959964 * sqrt(0.125 + z^2 / 16) / (1 + z^2 / 2) = 0.405469.
    """
    metrics = attempt_metrics(torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.5, 0.0, 0.0]), 4)
    assert metrics == pytest.approx(
        {
            "avg@4": (0.5 + 0.125) / 2, "avg@4_low": 0.125, "avg@4_high": 0.5,
            "pass@2": 5 / 12, "pass@2_low": 0.0, "pass@2_high": 5 / 6,
            "pass@4": 0.5, "pass@4_low": 0.5 - 0.405469, "pass@4_high": 0.5 + 0.405469,
        },
        abs=1e-6,
    )  # fmt: skip


def test_equal_partial_accuracies_have_no_interval() -> None:
    metrics = attempt_metrics(torch.tensor([0.5, 0.5, 0.25, 0.75]), 2)
    assert set(metrics) == {"avg@2", "pass@2", "pass@2_low", "pass@2_high"}


@pytest.mark.parametrize("setting", ["attempts", "temperature"])
def test_settings_of_sampling_are_rejected_where_nothing_is_sampled(setting: str) -> None:
    environment = SimpleNamespace(name="rows")
    parts = SimpleNamespace(config=SimpleNamespace(environment=environment), environment=SimpleNamespace(scores=False))
    made: Any = SimpleNamespace(parts=parts, config=SimpleNamespace(validation=ValidationConfig(**{setting: 2})))
    with pytest.raises(ConfigError, match=f"algorithm.validation.{setting}=2"):
        StepLoop._reject_attempts(made)


def rolled(outcomes: list[StepOutcome]) -> Any:
    """The rollout of two samples, in an environment that answers with `outcomes`."""
    config = SimpleNamespace(environment=SimpleNamespace(name="mine"))
    environment = SimpleNamespace(step=lambda samples, conversations: outcomes, scores=True)
    parts: Any = SimpleNamespace(
        tokenizer=character_tokenizer("ab"),
        generation=AnswersB(),
        environment=environment,
        config=config,
        images=None,
        timeline=None,
    )
    samples = [Sample(name, ({"role": "user", "content": "a"},), "b") for name in ("one", "two")]
    return single_turns(parts, samples, torch.arange(2))


def test_the_largest_rewards_give_finite_statistics() -> None:
    rewards = rolled([StepOutcome(LARGEST_REWARD), StepOutcome(-LARGEST_REWARD)]).rewards
    for settings in ({}, {"normalize_std": False}, {"leave_one_out": True}):
        advantages, _ = group_advantages(rewards.repeat(1000), 2000, **settings)
        assert advantages.isfinite().all()
    assert rewards.std().isfinite()


@pytest.mark.parametrize(
    "wrong", [1e308, 10**400, float("nan"), float("-inf"), "1", None, [1.0], 2 * LARGEST_REWARD, torch.ones(2)]
)
def test_a_reward_that_is_no_usable_number_names_the_sample(wrong: Any) -> None:
    with pytest.raises(UserError, match=r"environment 'mine' returned reward=.* for sample 'two'"):
        rolled([StepOutcome(1.0), StepOutcome(wrong)])
    with pytest.raises(UserError, match=r"returned bonus=.* for sample 'one'"):
        rolled([StepOutcome(1.0, metrics={"bonus": wrong}), StepOutcome(1.0)])


def test_another_number_of_outcomes() -> None:
    with pytest.raises(UserError, match="environment 'mine' returned 1 outcomes for 2 samples"):
        rolled([StepOutcome(1.0)])


def test_the_start_of_an_engine_is_not_part_of_the_validation(monkeypatch):
    times = iter((100.0, 112.0))
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    generation = SimpleNamespace(pop_metrics=lambda: {"time/refit": 2.0, "time/engine_start": 7.0})
    made: Any = SimpleNamespace(
        timeline=None, parts=SimpleNamespace(generation=generation), validate=lambda step: ({}, [])
    )
    metrics, _ = StepLoop._timed_validation(made, 0)
    assert metrics == {"time/validation": 5.0, "validation/refit_seconds": 2.0, "time/engine_start": 7.0}


@pytest.mark.parametrize(("step", "told"), [(4, True), (3, False)])
def test_resuming_a_finished_run_says_what_to_raise(monkeypatch, caplog, step, told):
    monkeypatch.setattr(loop, "restore_random_states", lambda states: None)
    config = SimpleNamespace(resume_with="rlframework train --resume runs/a {}".format)
    restored = SimpleNamespace(step=step, random=None, metrics={})
    resumed: Any = SimpleNamespace(
        _restored=restored,
        config=SimpleNamespace(num_steps=4),
        early_stopping=SimpleNamespace(ended=False),
        parts=SimpleNamespace(config=config),
    )
    assert StepLoop._begin(resumed) == {"step": step}
    assert ("raise algorithm.num_steps" in caplog.text) == told
    assert ("rlframework train --resume runs/a algorithm.num_steps=8" in caplog.text) == told


def test_metrics_of_a_loss_replace_none_of_the_frameworks_own(caplog):
    made: Any = SimpleNamespace(_warned_metrics=set())
    own = {"train/loss": 1.0, "train/lr": 0.5}
    of_loss = {"lr": 9.0, "reward": 9.0, "tokens": 9.0, "clip_fraction": 0.25}
    for _ in range(2):
        merged = StepLoop.with_loss_metrics(made, own, of_loss, taken=["train/reward"])
        assert merged == {**own, "train/clip_fraction": 0.25}
    [told] = [record.message for record in caplog.records]
    assert "its metrics lr, reward, tokens" in told
    merged = StepLoop.with_loss_metrics(made, own, {"reward": 9.0})
    assert merged == {**own, "train/reward": 9.0}  # where no rollout has one


@pytest.mark.parametrize(
    ("result", "described"),
    [
        (None, "returned a NoneType"),
        ({"train/loss": 1.0}, "returned a dict"),
        (({"train/loss": 1.0},), "returned a tuple of dict"),
        (({"train/loss": torch.tensor(1.0)}, []), "returned the metric 'train/loss' as a Tensor"),
    ],
)
def test_a_step_with_a_wrong_result_says_what_it_must_return(result, described):
    with pytest.raises(TypeError, match=rf"^Mine.train_step {described}; it must return \(metrics, samples\)"):
        require_step_result(result, "Mine")
    assert require_step_result(({"train/loss": 1}, []), "Mine") == ({"train/loss": 1}, [])


def test_a_result_is_shown_in_one_short_line() -> None:
    metrics = {"train/loss": 0.123456, "step": 20.0, "train/lr": 1e-3}
    assert repr(RunResult(metrics, [metrics] * 21)) == (
        "<RunResult: train/loss: 0.1235, step: 20; 3 metrics, history of 21 rows>"
    )
