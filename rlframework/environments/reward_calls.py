"""Call a user's reward function and read its return value. Its errors become values, never exceptions.

The calls run in the current process and cannot be interrupted; `own_reward` runs them in one that can be killed, by
`serve`. Async functions are awaited in one event loop, which stays open between calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import math
import numbers
import os
import signal
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from rlframework.base.errors import ConfigError, UserError
from rlframework.environments.process_ends import end_together
from rlframework.environments.reward_arguments import TextColumns, arguments_of
from rlframework.interfaces.environment import LARGEST_REWARD, Sample, StepOutcome
from rlframework.plugins.user_defined import load_reward, reward_form

FAILURES = "reward_failures"
"""The metric of an outcome that is 1 if the answer has no reward because the function failed."""


@dataclass(frozen=True)
class Failure:
    """Why an answer has no reward: a traceback or a sentence. `cause` is equal for failures with the same cause.

    `of_call`: the function takes all answers in one call, and has failed as a whole.
    """

    text: str
    cause: str
    of_call: bool = False


@dataclass(frozen=True)
class NotApplicable(Failure):
    """A batched function returned None for an answer, as TRL's do for rows that they do not score."""


RewardResult = StepOutcome | Failure
Report = Callable[[list[int], list[RewardResult] | None], None]
"""Called with the numbers of answers: first with None when their call starts, then with their results."""


class RewardCalls:
    """Calls the function at the import path `path`, or `function` itself if the path cannot be imported here.

    `timeout` limits each async call, in seconds; None sets no limit. At most `concurrency` async calls run at a time.
    """

    def __init__(
        self,
        path: str,
        *,
        timeout: float | None,
        concurrency: int,
        columns: TextColumns,
        function: Callable[..., Any] | None = None,
    ) -> None:
        """Load the function. Raises a `ConfigError` if it cannot be used as a reward."""
        self._function, self._form = load_reward(path) if function is None else (function, reward_form(path, function))
        self._path, self._timeout, self._concurrency = path, timeout, concurrency
        self._arguments = arguments_of(self._form, columns)
        self._runner: asyncio.Runner | None = None

    def score(self, samples: Sequence[Sample], completions: Sequence[str], report: Report) -> None:
        """Score every answer. Raises a `UserError` if a batched function returns the wrong number of values."""
        everything = list(range(len(samples)))
        calls = [everything] if self._form.batched else [[number] for number in everything]
        if self._form.is_async:
            self._runner = self._runner or asyncio.Runner()
            self._runner.run(self._score_async(calls, samples, completions, report))
            return
        for called in calls:
            report(called, None)
            try:
                returned = self._function(**self._given(called, samples, completions))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code; the error is reported
                returned = _failure_of(error)
            report(called, self._results(returned, len(called)))

    def close(self) -> None:
        """Close the event loop."""
        if self._runner is not None:
            self._runner.close()

    async def _score_async(
        self, calls: Sequence[list[int]], samples: Sequence[Sample], completions: Sequence[str], report: Report
    ) -> None:
        limit = asyncio.Semaphore(self._concurrency)

        async def score(called: list[int]) -> None:
            async with limit:
                report(called, None)
                timeout = asyncio.timeout(self._timeout)
                try:
                    async with timeout:
                        returned = await self._function(**self._given(called, samples, completions))
                except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code; the error is reported
                    returned = timed_out(self._timeout or 0.0) if timeout.expired() else _failure_of(error)
                report(called, self._results(returned, len(called)))

        await asyncio.gather(*map(score, calls))

    def _given(self, called: list[int], samples: Sequence[Sample], completions: Sequence[str]) -> dict[str, Any]:
        return self._arguments.of_call(
            [samples[number] for number in called], [completions[number] for number in called]
        )

    def _results(self, returned: Any, count: int) -> list[RewardResult]:
        if isinstance(returned, Failure):
            return [replace(returned, of_call=self._form.batched)] * count
        if not self._form.batched:
            return [read_result(returned)]
        if isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Iterable):
            text = f"it returned {returned!r:.80}, not a list with one value per answer"
            return [_wrong_type(text, returned)] * count
        try:
            values = list(returned.tolist() if hasattr(returned, "tolist") else returned)  # an array or a tensor
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a generator runs the user's code
            return [_failure_of(error)] * count
        if len(values) != count:
            raise UserError(
                f"environment.reward={self._path!r} ({self._form.place}) returned {len(values)} values for {count} "
                "answers; it must return one per answer, in the same order"
            )
        return [_NOT_APPLICABLE if value is None else read_result(value) for value in values]


_NOT_APPLICABLE = NotApplicable("it returned None for this answer, and there is no other reward", "None")


def timed_out(seconds: float, what: str = "it") -> Failure:
    """The failure of a call that was stopped after `seconds`."""
    text = f"{what} took more than environment.reward_timeout, which is {seconds:g} s"
    return Failure(text, text)


def serve(descriptor: int, stack: int) -> None:
    """Score the answers that the driver sends, as the program of a process of its own.

    `descriptor` is this side of the link: it receives the arguments of `RewardCalls` and then samples with completions,
    and sends what `RewardCalls.score` reports, ending with None. At SIGUSR1, the stack is written to the file `stack`.
    """
    for inherited in (descriptor, stack):
        os.set_inheritable(inherited, False)
    end_together((descriptor, stack))
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    link = Connection(descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the driver has exited
        try:
            calls = RewardCalls(**link.recv())
        except UserError as error:
            link.send(error)
            return
        except Exception as error:  # noqa: BLE001 - of the user's module
            link.send(
                ConfigError(f"{type(error).__name__} while the function and what it uses were unpickled: {error}")
            )
            return
        link.send(None)
        while True:
            samples, completions = link.recv()
            failure = None
            try:
                calls.score(samples, completions, lambda *called: link.send(called))
            except UserError as error:
                failure = error
            link.send(failure)


def _failure_of(error: BaseException) -> Failure:
    """The failure for `error`, with the traceback from the user's own code on."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    frames = traceback.extract_tb(trace)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = "".join(traceback.format_exception(error.with_traceback(trace))).rstrip()
    return Failure(text, f"{type(error).__name__} {where}")


def read_result(value: Any) -> RewardResult:
    """The result in one returned value: a number, or a dict with `reward` and other numbers.

    A dict with `score` in place of `reward`, as verl's functions return, may have other entries, which are left out.
    """
    try:
        named = _of_verl(value) if isinstance(value, Mapping) else {"reward": value}
        if "reward" not in named:
            return _wrong_type(f"it returned a dict without 'reward' or 'score': {value!r:.80}", value)
        read = {}
        for name, entry in named.items():
            number = _number(entry)
            if number is None or not isinstance(name, str):
                which = f"whose {name if name in value else 'score'!r}" if isinstance(value, Mapping) else "which"
                return _wrong_type(f"it returned {value!r:.80}, {which} is not a number", entry)
            if not abs(number) <= LARGEST_REWARD:
                why = f"is more than {LARGEST_REWARD:g} in size" if math.isfinite(number) else "is not finite"
                return Failure(f"it returned {value!r:.80}: {name} {why}", f"{why}: {name}")
            read[name] = number
        return StepOutcome(read.pop("reward"), metrics={**read, FAILURES: 0.0})
    except Exception as error:  # noqa: BLE001 - the value may be of a user-defined class
        return _failure_of(error)


def _of_verl(value: Mapping[Any, Any]) -> dict[Any, Any]:
    """`value`, in which the numbers of verl's dict stand with its `score` under the name `reward`."""
    if "reward" in value or "score" not in value:
        return dict(value)
    others = {name: entry for name, entry in value.items() if name != "score" and _number(entry) is not None}
    return {"reward": value["score"], **others}


def _number(value: Any) -> float | None:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a zero-dimensional array or tensor
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:
        return math.inf


def _wrong_type(text: str, value: Any) -> Failure:
    hint = "; write `async def`" if isinstance(value, Awaitable) else ""
    if inspect.iscoroutine(value):
        value.close()  # it is never awaited
    return Failure(text + hint, f"wrong type: {type(value).__name__}")
