"""Score answers with a user's own reward function: `environment.reward: my_module:score`.

An exception, a timeout or a value that is not a finite number is a failure of that answer: it gets `failed_reward` and
is counted, and the traceback is logged once per cause. The run ends only if more than `max_reward_failures`
of a step's answers fail.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlframework.environments.reward_calls import Failure, Report, RewardCalls, RewardResult
from rlframework.environments.reward_process import RewardJob, RewardProcess
from rlframework.errors import ConfigError, UserError
from rlframework.interfaces.environment import StepOutcome
from rlframework.plugins.user_defined import load_reward

if TYPE_CHECKING:
    from rlframework.config.environments import DatasetConfig
    from rlframework.interfaces.environment import Sample

_LOG = logging.getLogger(__name__)

FAILURES = "reward_failures"
"""The metric of an outcome that is 1 if the answer has no reward because the function failed."""

_MAX_CAUSES = 10
"""Causes of failure that are printed."""


class OwnReward:
    """Scores answers with the function that `environment.reward` names."""

    def __init__(self, config: DatasetConfig) -> None:
        """Load the function; a `ConfigError` if it cannot be used. No process is started yet."""
        assert config.reward is not None
        self._config = config
        try:
            form = load_reward(config.reward)[1]
        except ConfigError as error:
            raise ConfigError(f"environment.reward: {error}") from error
        self._name = f"environment.reward={config.reward!r} ({form.place})"
        self._printed: set[str] = set()
        concurrency, timeout = config.reward_concurrency, config.reward_timeout
        self._calls: RewardProcess | _InProcess
        if timeout is None:
            self._calls = _InProcess(RewardCalls(config.reward, timeout=None, concurrency=concurrency))
        else:
            self._calls = RewardProcess(RewardJob(config.reward, timeout, concurrency, form.is_async))

    def score(self, samples: Sequence[Sample], completions: Sequence[str]) -> list[StepOutcome]:
        """Return one outcome per answer. Raises a `UserError` with the first failure once too many have failed."""
        step = _Step(len(samples))

        def report(numbers: list[int], results: list[RewardResult] | None) -> None:
            for number, result in zip(numbers, results or (), strict=False):
                step.results[number] = result
                if isinstance(result, Failure):
                    step.failures.append((samples[number].id, result))
                    self._print(samples[number].id, result)
            self._check(step)

        self._calls.score(samples, completions, report)
        return [self._outcome(step.results[number]) for number in range(len(samples))]

    def close(self) -> None:
        """End the function's process or thread."""
        self._calls.close()

    def _outcome(self, result: RewardResult) -> StepOutcome:
        if isinstance(result, Failure):
            return StepOutcome(self._config.failed_reward, metrics={"accuracy": 0.0, FAILURES: 1.0})
        return StepOutcome(result.reward, metrics={**result.metrics, FAILURES: 0.0})

    def _print(self, sample_id: str, failure: Failure) -> None:
        """Log `failure`, unless its cause was logged before."""
        if failure.cause in self._printed or len(self._printed) >= _MAX_CAUSES:
            return
        self._printed.add(failure.cause)
        more = "" if len(self._printed) < _MAX_CAUSES else "; failures with further causes are counted, not printed"
        _LOG.warning("%s failed for sample %r%s:\n%s", self._name, sample_id, more, failure.text)

    def _check(self, step: _Step) -> None:
        """Raise a `UserError` if too many answers have failed."""
        count, total, allowed = len(step.failures), step.total, self._config.max_reward_failures
        if count <= allowed * total:
            return
        sample_id, first = step.failures[0]
        raise UserError(
            f"{self._name} failed for {count} of the first {len(step.results)} of {total} answers, which is more than "
            f"environment.max_reward_failures={allowed:g} allows. The first, for sample {sample_id!r}:\n{first.text}"
        )


@dataclass
class _Step:
    """Results of one step so far, by the number of the answer; failures with the id of their sample."""

    total: int
    results: dict[int, RewardResult] = field(default_factory=dict)
    failures: list[tuple[str, Failure]] = field(default_factory=list)


class _InProcess:
    """Calls in this process, which cannot be stopped. Async calls use a thread: this one may run another event loop."""

    def __init__(self, calls: RewardCalls) -> None:
        self._calls = calls
        self._thread = ThreadPoolExecutor(1, "reward") if calls.form.is_async else None

    def score(self, samples: Sequence[Sample], completions: Sequence[str], report: Report) -> None:
        """See `RewardCalls.score`."""
        if self._thread is None:
            self._calls.score(samples, completions, report)
        else:
            self._thread.submit(self._calls.score, samples, completions, report).result()

    def close(self) -> None:
        """Close the event loop and end its thread."""
        if self._thread is None:
            self._calls.close()
        else:
            self._thread.submit(self._calls.close).result()
            self._thread.shutdown()
