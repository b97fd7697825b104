"""Score the answers of episodes by the check or the reward functions of `DatasetConfig`, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rlframework.base.errors import UserError
from rlframework.environments.counted_failures import too_many
from rlframework.environments.reward_calls import FAILURES
from rlframework.interfaces.environment import Sample, StepOutcome
from rlframework.interfaces.messages import Message

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
