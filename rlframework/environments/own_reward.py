"""Score answers with a user's own reward function: `environment.reward: my_module:score`.

An exception, a timeout or a value that is not a finite number is a failure of that answer: it gets `failed_reward` and
is counted, and the traceback is logged once per cause. The run ends only if more than `max_reward_failures`
of a step's answers fail.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rlframework.config.environments import DatasetConfig
from rlframework.environments.reward_calls import FAILURES, Failure, RewardCalls, RewardResult
from rlframework.environments.reward_process import RewardProcess
from rlframework.errors import ConfigError, UserError
from rlframework.interfaces.environment import Sample, StepOutcome
from rlframework.plugins.user_defined import load_reward

_LOG = logging.getLogger(__name__)

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
        timeout, limit = config.reward_timeout, config.reward_concurrency
        self._calls: RewardCalls | RewardProcess
        self._thread: ThreadPoolExecutor | None = None
        if timeout is not None:
            self._calls = RewardProcess(config.reward, timeout=timeout, concurrency=limit, is_async=form.is_async)
        else:
            self._calls = RewardCalls(config.reward, timeout=None, concurrency=limit)
            if form.is_async:  # in a thread, because this one may run another event loop
                self._thread = ThreadPoolExecutor(1, "reward")

    def score(self, samples: Sequence[Sample], completions: Sequence[str]) -> list[StepOutcome]:
        """Return one outcome per answer. Raises a `UserError` with the first failure once too many have failed."""
        failed = StepOutcome(self._config.failed_reward, metrics={"accuracy": 0.0, FAILURES: 1.0})
        outcomes: dict[int, StepOutcome] = {}
        failures: list[tuple[str, Failure]] = []

        def report(numbers: list[int], results: list[RewardResult] | None) -> None:
            for number, result in zip(numbers, results or (), strict=False):
                if isinstance(result, Failure):
                    failures.append((samples[number].id, result))
                    self._print(samples[number].id, result)
                outcomes[number] = failed if isinstance(result, Failure) else result
            self._check(failures, len(outcomes), len(samples))

        if self._thread is None:
            self._calls.score(samples, completions, report)
        else:
            self._thread.submit(self._calls.score, samples, completions, report).result()
        return [outcomes[number] for number in range(len(samples))]

    def close(self) -> None:
        """End the function's process or thread."""
        if self._thread is None:
            self._calls.close()
        else:
            self._thread.submit(self._calls.close).result()
            self._thread.shutdown()

    def _print(self, sample_id: str, failure: Failure) -> None:
        """Log `failure`, unless its cause was logged before."""
        if failure.cause in self._printed or len(self._printed) >= _MAX_CAUSES:
            return
        self._printed.add(failure.cause)
        more = "" if len(self._printed) < _MAX_CAUSES else "; failures with further causes are counted, not printed"
        _LOG.warning("%s failed for sample %r%s:\n%s", self._name, sample_id, more, failure.text)

    def _check(self, failures: Sequence[tuple[str, Failure]], scored: int, total: int) -> None:
        """Raise a `UserError` if too many of the `total` answers have failed."""
        allowed = self._config.max_reward_failures
        if len(failures) <= allowed * total:
            return
        sample_id, first = failures[0]
        raise UserError(
            f"{self._name} failed for {len(failures)} of the first {scored} of {total} answers, which is more than "
            f"environment.max_reward_failures={allowed:g} allows. The first, for sample {sample_id!r}:\n{first.text}"
        )
