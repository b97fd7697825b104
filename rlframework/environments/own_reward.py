"""A user's own reward function, by its import path, as a judge of answers: `environment.reward: my_module:score`.

An exception, a timeout, and what is no finite number is that answer's failure: it gets `failed_reward`, is counted, and
its traceback goes to stderr, each of another cause once. Only more of them than `max_reward_failures` end the run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlframework.environments.reward_calls import Failure, Judged, RewardCalls, Tell
from rlframework.environments.reward_process import RewardJob, RewardProcess
from rlframework.errors import ConfigError, UserError
from rlframework.interfaces.environment import StepOutcome
from rlframework.plugins.own_parts import load_reward

if TYPE_CHECKING:
    from rlframework.config.environments import DatasetConfig
    from rlframework.interfaces.environment import Sample

FAILURES = "reward_failures"
"""The metric of an outcome that is 1 where its reward could not be told."""

_TOLD = 10
"""Failures of so many causes are told."""


class OwnReward:
    """Judges answers by the function that `environment.reward` names."""

    def __init__(self, config: DatasetConfig) -> None:
        """Find the function; a `ConfigError` where it cannot be used. No process is started yet."""
        assert config.reward is not None
        self._config = config
        try:
            form = load_reward(config.reward)[1]
        except ConfigError as error:
            raise ConfigError(f"environment.reward: {error}") from error
        self._name = f"environment.reward={config.reward!r} ({form.place})"
        self._told: set[str] = set()
        concurrency, timeout = config.reward_concurrency, config.reward_timeout
        self._calls: RewardProcess | _Here
        if timeout is None:
            self._calls = _Here(RewardCalls(config.reward, timeout=None, concurrency=concurrency))
        else:
            self._calls = RewardProcess(RewardJob(config.reward, timeout, concurrency, form.is_async))

    def judge(self, samples: Sequence[Sample], completions: Sequence[str]) -> list[StepOutcome]:
        """One outcome for each answer. A `UserError` with the first failure as soon as there are too many of them."""
        ledger = _Ledger(len(samples))

        def tell(numbers: list[int], judged: list[Judged] | None) -> None:
            for number, one in zip(numbers, judged or (), strict=False):
                ledger.judged[number] = one
                if isinstance(one, Failure):
                    ledger.failures.append((samples[number].id, one))
                    self._tell(samples[number].id, one)
            self._check(ledger)

        self._calls.judge(samples, completions, tell)
        return [self._outcome(ledger.judged[number]) for number in range(len(samples))]

    def close(self) -> None:
        """End what runs for it."""
        self._calls.close()

    def _outcome(self, judged: Judged) -> StepOutcome:
        if isinstance(judged, Failure):
            return StepOutcome(self._config.failed_reward, metrics={"accuracy": 0.0, FAILURES: 1.0})
        return StepOutcome(judged.reward, metrics={**judged.metrics, FAILURES: 0.0})

    def _tell(self, sample_id: str, failure: Failure) -> None:
        if failure.cause in self._told or len(self._told) >= _TOLD:
            return
        self._told.add(failure.cause)
        more = "" if len(self._told) < _TOLD else "; failures of further causes are counted and not shown"
        print(f"{self._name} failed for sample {sample_id!r}{more}:\n{failure.text}", file=sys.stderr, flush=True)

    def _check(self, ledger: _Ledger) -> None:
        count, total, allowed = len(ledger.failures), ledger.total, self._config.max_reward_failures
        if count <= allowed * total:
            return
        sample_id, first = ledger.failures[0]
        raise UserError(
            f"{self._name} failed for {count} of the first {len(ledger.judged)} of {total} answers, which is more than "
            f"environment.max_reward_failures={allowed:g} allows. The first, for sample {sample_id!r}:\n{first.text}"
        )


@dataclass
class _Ledger:
    """What is known of the answers of one step so far."""

    total: int
    judged: dict[int, Judged] = field(default_factory=dict)
    failures: list[tuple[str, Failure]] = field(default_factory=list)


class _Here:
    """Calls in this process, which nothing can end. Async ones in a thread: this one's loop may be another's."""

    def __init__(self, calls: RewardCalls) -> None:
        self._calls = calls
        self._thread = ThreadPoolExecutor(1, "reward") if calls.form.is_async else None

    def judge(self, samples: Sequence[Sample], completions: Sequence[str], tell: Tell) -> None:
        """See `RewardCalls.judge`."""
        if self._thread is None:
            self._calls.judge(samples, completions, tell)
        else:
            self._thread.submit(self._calls.judge, samples, completions, tell).result()

    def close(self) -> None:
        """End the loop and its thread."""
        if self._thread is None:
            self._calls.close()
        else:
            self._thread.submit(self._calls.close).result()
            self._thread.shutdown()
