"""Turn the results of a reward's calls into outcomes, of batches and of episodes, and count its failures.

A failure of an answer gives it `failed_reward` and is counted; its text, such as a traceback, is logged once per cause.
The run ends only if more than `max_reward_failures` of the answers that a training step takes at a time fail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rlframework.base.errors import UserError
from rlframework.config.environments import DatasetConfig
from rlframework.environments.reward_calls import FAILURES, Failure, NotApplicable, Report, RewardResult
from rlframework.interfaces.environment import Sample, StepOutcome
from rlframework.interfaces.messages import Message

_LOG = logging.getLogger(__name__)

ABSENT = StepOutcome(0.0, metrics={FAILURES: 0.0})
"""The outcome of an optional reward that is not for the answer. It is recognized by identity."""

ScoreCalls = Callable[[Sequence[Sample], Sequence[str], Report], None]
"""Scores each completion of a sample, and reports the results as `RewardCalls.score` does."""


class CountedFailures:
    """Counts the failures of one reward, which messages call `name`, by the limits of `config`.

    `optional`: there are other rewards, so an answer that this one is not for (`NotApplicable`) is not a failure.
    """

    def __init__(self, config: DatasetConfig, name: str, *, optional: bool = False) -> None:
        self._config, self._name, self._optional = config, name, optional
        self._logged: set[str] = set()

    def outcomes(
        self, samples: Sequence[Sample], completions: Sequence[str], score: ScoreCalls, *, counted: bool
    ) -> list[StepOutcome]:
        """Return one outcome per answer. If `counted`, raises a `UserError` with the first failure once too many have.

        `counted`: whether these are all answers of which a fraction may fail.
        """
        failed = StepOutcome(self._config.failed_reward, metrics={"accuracy": 0.0, FAILURES: 1.0})
        outcomes: dict[int, StepOutcome] = {}
        failures: list[tuple[str, Failure]] = []

        def report(numbers: list[int], results: list[RewardResult] | None) -> None:
            known = len(failures)
            for number, result in zip(numbers, results or (), strict=False):
                if isinstance(result, NotApplicable) and self._optional:
                    outcomes[number] = ABSENT
                    continue
                outcomes[number] = failed if isinstance(result, Failure) else result
                if isinstance(result, Failure):
                    failures.append((samples[number].id, result))
            allowed = self._config.max_reward_failures
            if counted and len(failures) > allowed * len(samples):
                scored = f"the first {len(outcomes)} of " if len(outcomes) < len(samples) else ""
                raise UserError(
                    f"{self._name} failed for {len(failures)} of {scored}{len(samples)} answers, "
                    f"which is more than environment.max_reward_failures={allowed:g} allows. "
                    f"{self._first(*failures[0])}"
                )
            for sample_id, failure in failures[known:]:  # after the error, which has the text
                if failure.cause not in self._logged:
                    self._logged.add(failure.cause)
                    where = "in a call with all answers" if failure.of_call else f"for sample {sample_id!r}"
                    _LOG.warning("%s failed %s:\n%s", self._name, where, failure.text)

        score(samples, completions, report)
        return [outcomes[number] for number in range(len(samples))]

    def _first(self, sample_id: str, failure: Failure) -> str:
        """The end of the error for too many failures: the text of the first one, unless the log has it."""
        if failure.cause in self._logged:
            return f"One like the first, for sample {sample_id!r}, is logged above: {failure.text.splitlines()[-1]}"
        if failure.of_call:
            return f"The function takes all answers in one call, so its error fails all of them:\n{failure.text}"
        return f"The first, for sample {sample_id!r}:\n{failure.text}"


def require_few_failures(outcomes: Sequence[StepOutcome], allowed: float) -> None:
    """Raise `UserError` if more than the fraction `allowed` of `outcomes` have the metric `reward_failures`."""
    failed = sum(bool(outcome.metrics.get(FAILURES)) for outcome in outcomes)
    if failed > allowed * len(outcomes):
        raise UserError(too_many(failed, len(outcomes), allowed))


def too_many(failed: int, answers: int, allowed: float) -> str:
    """The message for `failed` of `answers` whose first failure has been logged."""
    return (
        f"environment.reward failed for {failed} of {answers} answers, which is more than "
        f"environment.max_reward_failures={allowed:g} allows; the first is in the log"
    )


StepFunction = Callable[[Sequence[Sample], Sequence[Sequence[Message]]], list[StepOutcome]]

_FEWEST = 16
"""Answers before the fraction of failures counts: the first failure alone would end a run."""


class AnswerScores:
    """Runs `step`, which scores a batch of single turns, for one answer at a time in a thread that lives as long.

    One thread: reward functions in a process of their own end with the thread that started them. If more than the
    fraction `allowed` of all answers, and of at least 16, could not be scored, this and all later answers raise a
    `UserError`: an error of one episode would cost that episode alone.
    """

    def __init__(self, step: StepFunction, allowed: float) -> None:
        self._step, self._allowed = step, allowed
        self._thread = ThreadPoolExecutor(1, "answer scores")
        self._answers = self._failures = 0
        self._stopped = ""
        self._closed = False

    async def score(self, sample: Sample, answer: Message) -> StepOutcome:
        """Return the outcome of `answer`, a turn without tool calls."""
        if not self._stopped:
            conversation = [*sample.messages, answer]
            loop = asyncio.get_running_loop()
            outcome = (await loop.run_in_executor(self._thread, self._step, [sample], [conversation]))[0]
            self._count(outcome)
        if self._stopped:
            raise UserError(self._stopped)
        return outcome

    def close(self, shutdown: Callable[[], None]) -> None:
        """Call `shutdown` in the thread, after what it is doing, and end it. Does nothing the second time."""
        if not self._closed:
            self._closed = True
            self._thread.submit(shutdown).result()
            self._thread.shutdown()

    def _count(self, outcome: StepOutcome) -> None:
        self._answers += 1
        self._failures += int(outcome.metrics.get(FAILURES, 0.0))
        if not self._stopped and self._failures > self._allowed * max(self._answers, _FEWEST):
            self._stopped = too_many(self._failures, self._answers, self._allowed)
