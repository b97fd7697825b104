"""Calls of trainer and engines during a refit, whose failures become a `RefitError` that names who failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from rlframework.base.errors import DeadlineExceeded, EngineLost, RefitError, UserError, WorkerError, WorkerLost
from rlframework.interfaces.policy_worker import Attempt
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerGroup

P = ParamSpec("P")
R = TypeVar("R")


class RefitEngine(Protocol):
    """A generation engine in a worker group of its own, as the driver calls it during a refit."""

    @property
    def name(self) -> str:
        """The engine's name in messages."""

    @property
    def in_driver(self) -> bool:
        """Whether the engine runs in the driver's process, where calls return when they are done."""

    def start(self, method: str, /, **arguments: Any) -> MultiWorkerFuture:
        """Start a call of the engine's worker."""

    def results(self, future: MultiWorkerFuture, deadline: float | None = None) -> list[Any]:
        """Wait for a call, up to `deadline` seconds, and return its results."""


@dataclass(frozen=True)
class StartedCall:
    """A call of an engine: its future, or the error with which it could not be started."""

    engine: RefitEngine
    started: MultiWorkerFuture | WorkerError

    def result(self, deadline: float) -> Any:
        """Wait up to `deadline` seconds; raise `EngineLost` if the engine is gone or late, `RefitError` if it fails."""
        try:
            if isinstance(self.started, WorkerError):
                raise self.started
            ((result, error, *_),) = self.engine.results(self.started, deadline)
        except DeadlineExceeded as late:
            raise EngineLost(
                f"{self.engine.name} did not finish its part of a refit within generation.refit.deadline: {late}"
            ) from late
        except WorkerError as failed:
            lost = EngineLost if isinstance(failed, WorkerLost) else RefitError
            raise lost(f"{self.engine.name}: {failed}") from failed
        if error:
            raise RefitError(f"{self.engine.name}: {error}")
        return result


class RefitCalls:
    """Calls of the workers of `trainer` and of `engines`, each of which has `deadline` seconds for a call.

    Methods are given as functions of the interface. The trainer has a deadline of its own.
    """

    def __init__(self, trainer: WorkerGroup, engines: Sequence[RefitEngine], deadline: float) -> None:
        self._trainer, self.engines, self._deadline = trainer, engines, deadline

    def of(self, engines: Sequence[RefitEngine]) -> RefitCalls:
        """Return the calls with only these engines."""
        return RefitCalls(self._trainer, engines, self._deadline)

    def on_rank_0(self, method: Callable[[Any], R]) -> R:
        """Call the trainer's first worker."""
        future = self._trainer.run_single_worker_single_data("attempt", 0, method=method.__name__, arguments={})
        result: R = self.of_trainer(future)[0]
        return result

    def on_trainer(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **arguments: P.kwargs) -> list[R]:
        """Call all workers of the trainer."""
        return self.of_trainer(self.start_trainer(method, *args, **arguments))

    def start_trainer(
        self, method: Callable[Concatenate[Any, P], Any], *_: P.args, **arguments: P.kwargs
    ) -> MultiWorkerFuture:
        """Start a call of all workers of the trainer."""
        return self._trainer.run_all_workers_single_data("attempt", method=method.__name__, arguments=arguments)

    def of_trainer(self, future: MultiWorkerFuture) -> list[Any]:
        """Wait for a call of the trainer, and return its results by rank.

        Raises a `UserError` if that is what all ranks raised that failed, and otherwise `RefitError`.
        """
        answers = [Attempt(*answer) for answer in self._trainer.get_all_worker_results(future)]
        if failed := {rank: answer for rank, answer in enumerate(answers) if answer.error}:
            kind = UserError if all(answer.user_error for answer in failed.values()) else RefitError
            raise kind("; ".join(f"rank {rank} of the trainer: {answer.error}" for rank, answer in failed.items()))
        return [answer.result for answer in answers]

    def on_engines(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **arguments: P.kwargs) -> list[R]:
        """Call all engines."""
        return self.of_engines(self.start_engines(method, *args, **arguments))

    def start_engines(
        self, method: Callable[Concatenate[Any, P], Any], *_: P.args, **arguments: P.kwargs
    ) -> list[StartedCall]:
        """Start a call of all engines."""
        calls = list[StartedCall]()
        for engine in self.engines:
            try:
                future = engine.start("attempt", method=method.__name__, arguments=arguments)
                calls.append(StartedCall(engine, future))
            except WorkerError as error:
                calls.append(StartedCall(engine, error))
        return calls

    def of_engines(self, started: Sequence[StartedCall], more: float = 0.0) -> list[Any]:
        """Wait for calls of the engines, with `more` seconds than the deadline; raise the errors of all that fail."""
        until = time.monotonic() + self._deadline + more
        results, errors = [], []
        for call in started:
            try:
                results.append(call.result(max(0.1, until - time.monotonic())))
            except RefitError as error:
                errors.append(error)
        if errors:
            worst = next((error for error in errors if isinstance(error, EngineLost)), errors[0])
            raise type(worst)("; ".join(map(str, errors))) from worst
        return results
