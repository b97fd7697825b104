"""Calls a user's reward function and reads what it returns. What goes wrong in it is a value, never an exception.

It runs in the process that it is used in, and what hangs hangs: `reward_process` is what can be stopped. Async
functions are awaited in one event loop, which stays the same from call to call.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlframework.errors import UserError
from rlframework.plugins.own_parts import load_reward

if TYPE_CHECKING:
    from types import TracebackType

    from rlframework.interfaces.environment import Sample

_SHOWN = 80


@dataclass(frozen=True)
class Verdict:
    """What the function says to one answer."""

    reward: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Failure:
    """Why there is no verdict: a traceback, or a sentence. `cause` is the same for failures of one cause."""

    text: str
    cause: str


Judged = Verdict | Failure
Tell = Callable[[list[int], list[Judged] | None], None]
"""Is told the numbers of answers: with None that judging them begins now, then what came of each."""


class RewardCalls:
    """The function at an import path. An async call that takes more than `timeout` seconds is ended; None: none is."""

    def __init__(self, path: str, *, timeout: float | None, concurrency: int) -> None:
        self.function, self.form = load_reward(path)
        self._path, self._timeout, self._concurrency = path, timeout, concurrency
        self._runner: asyncio.Runner | None = None

    def judge(self, samples: Sequence[Sample], completions: Sequence[str], tell: Tell) -> None:
        """Have every answer judged. A `UserError` where a batched function returns another number of values."""
        if self.form.is_async:
            self._runner = self._runner or asyncio.Runner()
            self._runner.run(self._awaited(samples, completions, tell))
        elif self.form.batched:
            everything = list(range(len(samples)))
            tell(everything, None)
            tell(everything, self._all(self._called(samples, completions), len(samples)))
        else:
            for number, (sample, completion) in enumerate(zip(samples, completions, strict=True)):
                tell([number], None)
                tell([number], [_one(self._called(sample, completion))])

    def close(self) -> None:
        """End the event loop."""
        if self._runner is not None:
            self._runner.close()

    def _arguments(self, samples: Any, completions: Any) -> dict[str, Any]:
        """Values for the parameters, of one answer or of all."""
        if not self.form.batched:
            given = {"sample": samples, "completion": completions, "answer": samples.answer, "prompt": _prompt(samples)}
        else:
            given = {
                "samples": list(samples),
                "completions": list(completions),
                "answers": [sample.answer for sample in samples],
                "prompts": [_prompt(sample) for sample in samples],
            }
        return {name: given[name] for name in self.form.names}

    def _called(self, samples: Any, completions: Any) -> Any:
        """What the function returns, or a `Failure`."""
        try:
            return self.function(**self._arguments(samples, completions))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's own, which is told
            return failure_of(error)

    async def _awaited(self, samples: Sequence[Sample], completions: Sequence[str], tell: Tell) -> None:
        everything = list(range(len(samples)))
        if self.form.batched:
            tell(everything, None)
            tell(everything, self._all(await self._result(samples, completions), len(samples)))
            return
        gate = asyncio.Semaphore(self._concurrency)

        async def judge(number: int) -> None:
            async with gate:
                tell([number], None)
                tell([number], [_one(await self._result(samples[number], completions[number]))])

        await asyncio.gather(*map(judge, everything))

    async def _result(self, samples: Any, completions: Any) -> Any:
        """What awaiting the function gives, or a `Failure`."""
        waited = asyncio.timeout(self._timeout)
        try:
            async with waited:
                return await self.function(**self._arguments(samples, completions))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's own, which is told
            return too_long(self._timeout or 0.0) if waited.expired() else failure_of(error)

    def _all(self, returned: Any, count: int) -> list[Judged]:
        """The verdicts in what a batched function returned."""
        if isinstance(returned, Failure):
            return [returned] * count
        if isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Iterable):
            wrong = f"it returned {_shown(returned)}, not a list with a value for each of the answers"
            return [_wrong(wrong, returned)] * count
        try:
            values = list(returned.tolist() if hasattr(returned, "tolist") else returned)  # an array, a tensor
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a generator is the user's own code
            return [failure_of(error)] * count
        if len(values) != count:
            raise UserError(
                f"environment.reward={self._path!r} ({self.form.place}) returned {len(values)} values for {count} "
                "answers: it must return one for each, in their order"
            )
        return [_one(value) for value in values]


def failure_of(error: BaseException) -> Failure:
    """The failure that `error` is, with its traceback from the user's own code on."""
    error = error.with_traceback(_behind_here(error.__traceback__))
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return Failure("".join(traceback.format_exception(error)).rstrip(), f"{type(error).__name__} {where}")


def too_long(seconds: float, what: str = "it") -> Failure:
    """The failure of a call that was ended after `seconds`."""
    text = f"{what} took more than environment.reward_timeout, which is {seconds:g} s"
    return Failure(text, text)


def _behind_here(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _one(value: Any) -> Judged:
    """The verdict in one value: a number, or a dict with `reward` and other numbers."""
    if isinstance(value, Failure):
        return value
    try:
        return _read(value)
    except Exception as error:  # noqa: BLE001 - a class of the user's own
        return failure_of(error)


def _read(value: Any) -> Judged:
    named = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in named:
        return _wrong(f"it returned a dict without 'reward': {_shown(value)}", value)
    read = {}
    for name, entry in named.items():
        number = _number(entry)
        if number is None or not isinstance(name, str):
            return _wrong(f"it returned {_shown(value)}, which is no number: {_type(entry)}", entry)
        if not math.isfinite(number):
            return Failure(f"it returned {_shown(value)}: {name} is not finite", f"not finite: {name}")
        read[name] = number
    return Verdict(read.pop("reward"), read)


def _number(value: Any) -> float | None:
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # an array or tensor of no dimension
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _wrong(text: str, value: Any) -> Failure:
    hint = "; write `async def`" if isinstance(value, Awaitable) else ""
    if inspect.iscoroutine(value):
        value.close()  # nobody awaits it
    return Failure(text + hint, f"wrong type: {_type(value)}")


def _type(value: Any) -> str:
    return type(value).__name__


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _prompt(sample: Sample) -> str:
    """What was asked last."""
    return sample.messages[-1]["content"] if sample.messages else ""
