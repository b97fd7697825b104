"""Call a user's reward function and read its return value. Its errors become values, never exceptions.

The calls run in the current process and cannot be interrupted; `reward_process` runs them in one that can be killed.
Async functions are awaited in one event loop, which stays open between calls.
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
from rlframework.plugins.user_defined import load_reward, reward_form

if TYPE_CHECKING:
    from types import TracebackType

    from rlframework.interfaces.environment import Sample

_MAX_SHOWN = 80
_TRL_TEXTS = {"prompt", "completion", "prompts", "completions"}
"""Columns that TRL does not pass on: they are, or would clash with, its two arguments."""


@dataclass(frozen=True)
class RewardValue:
    """The reward of one answer, and the other numbers that the function returned, by name."""

    reward: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Failure:
    """Why an answer has no reward: a traceback or a sentence. `cause` is equal for failures with the same cause."""

    text: str
    cause: str


RewardResult = RewardValue | Failure
Report = Callable[[list[int], list[RewardResult] | None], None]
"""Called with the numbers of answers: first with None when their call starts, then with their results."""


class RewardCalls:
    """Calls the function at the import path `path`, or `function` itself if the path cannot be imported here.

    `timeout` limits each async call, in seconds; None sets no limit. At most `concurrency` async calls run at a time.
    """

    def __init__(
        self, path: str, *, timeout: float | None, concurrency: int, function: Callable[..., Any] | None = None
    ) -> None:
        """Load the function. Raises a `ConfigError` if it cannot be used as a reward."""
        if function is None:
            self.function, self.form = load_reward(path)
        else:
            self.function, self.form = function, reward_form(path, function)
        self._path, self._timeout, self._concurrency = path, timeout, concurrency
        self._runner: asyncio.Runner | None = None

    def score(self, samples: Sequence[Sample], completions: Sequence[str], report: Report) -> None:
        """Score every answer. Raises a `UserError` if a batched function returns the wrong number of values."""
        if self.form.is_async:
            self._runner = self._runner or asyncio.Runner()
            self._runner.run(self._score_async(samples, completions, report))
        elif self.form.batched:
            everything = list(range(len(samples)))
            report(everything, None)
            report(everything, self._results(self._call(samples, completions), len(samples)))
        else:
            for number, (sample, completion) in enumerate(zip(samples, completions, strict=True)):
                report([number], None)
                report([number], [_result(self._call(sample, completion))])

    def close(self) -> None:
        """Close the event loop."""
        if self._runner is not None:
            self._runner.close()

    def _arguments(self, samples: Any, completions: Any) -> dict[str, Any]:
        """Keyword arguments for the function, of one answer or of all."""
        if self.form.columns:
            return _trl_arguments(samples, completions)
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

    def _call(self, samples: Any, completions: Any) -> Any:
        """The function's return value, or a `Failure`."""
        try:
            return self.function(**self._arguments(samples, completions))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code; the error is reported
            return failure_of(error)

    async def _score_async(self, samples: Sequence[Sample], completions: Sequence[str], report: Report) -> None:
        everything = list(range(len(samples)))
        if self.form.batched:
            report(everything, None)
            report(everything, self._results(await self._call_async(samples, completions), len(samples)))
            return
        limit = asyncio.Semaphore(self._concurrency)

        async def score(number: int) -> None:
            async with limit:
                report([number], None)
                report([number], [_result(await self._call_async(samples[number], completions[number]))])

        await asyncio.gather(*map(score, everything))

    async def _call_async(self, samples: Any, completions: Any) -> Any:
        """The awaited return value, or a `Failure`."""
        timeout = asyncio.timeout(self._timeout)
        try:
            async with timeout:
                return await self.function(**self._arguments(samples, completions))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code; the error is reported
            return timed_out(self._timeout or 0.0) if timeout.expired() else failure_of(error)

    def _results(self, returned: Any, count: int) -> list[RewardResult]:
        """The results in the return value of a batched function."""
        if isinstance(returned, Failure):
            return [returned] * count
        if isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Iterable):
            wrong = f"it returned {_shown(returned)}, not a list with one value per answer"
            return [_wrong_type(wrong, returned)] * count
        try:
            values = list(returned.tolist() if hasattr(returned, "tolist") else returned)  # an array or a tensor
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a generator runs the user's code
            return [failure_of(error)] * count
        if len(values) != count:
            raise UserError(
                f"environment.reward={self._path!r} ({self.form.place}) returned {len(values)} values for {count} "
                "answers; it must return one per answer, in the same order"
            )
        return [_result(value) for value in values]


def failure_of(error: BaseException) -> Failure:
    """The failure for `error`, with the traceback from the user's own code on."""
    error = error.with_traceback(_outside_this_file(error.__traceback__))
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return Failure("".join(traceback.format_exception(error)).rstrip(), f"{type(error).__name__} {where}")


def timed_out(seconds: float, what: str = "it") -> Failure:
    """The failure of a call that was stopped after `seconds`."""
    text = f"{what} took more than environment.reward_timeout, which is {seconds:g} s"
    return Failure(text, text)


def _trl_arguments(samples: Sequence[Sample], completions: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments of TRL: `prompts`, `completions`, and a list for each other column of the rows.

    If the column `prompt` holds messages, prompts and completions are lists of messages, else texts.
    """
    rows = [sample.metadata for sample in samples]
    names = dict.fromkeys(name for row in rows for name in row if name not in _TRL_TEXTS)
    prompts, answers = [], []
    for row, sample, completion in zip(rows, samples, completions, strict=True):
        conversational = isinstance(row.get("prompt"), list)
        prompts.append(row["prompt"] if conversational else _prompt(sample))
        answers.append([{"role": "assistant", "content": completion}] if conversational else completion)
    return {**{name: [row.get(name) for row in rows] for name in names}, "prompts": prompts, "completions": answers}


def _outside_this_file(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _result(value: Any) -> RewardResult:
    """The result in one returned value: a number, or a dict with `reward` and other numbers."""
    if isinstance(value, Failure):
        return value
    try:
        return _read(value)
    except Exception as error:  # noqa: BLE001 - the value may be of a user-defined class
        return failure_of(error)


def _read(value: Any) -> RewardResult:
    named = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in named:
        return _wrong_type(f"it returned a dict without 'reward': {_shown(value)}", value)
    read = {}
    for name, entry in named.items():
        number = _number(entry)
        if number is None or not isinstance(name, str):
            return _wrong_type(f"it returned {_shown(value)}, which is not a number: {_type(entry)}", entry)
        if not math.isfinite(number):
            return Failure(f"it returned {_shown(value)}: {name} is not finite", f"not finite: {name}")
        read[name] = number
    return RewardValue(read.pop("reward"), read)


def _number(value: Any) -> float | None:
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a zero-dimensional array or tensor
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _wrong_type(text: str, value: Any) -> Failure:
    hint = "; write `async def`" if isinstance(value, Awaitable) else ""
    if inspect.iscoroutine(value):
        value.close()  # it is never awaited
    return Failure(text + hint, f"wrong type: {_type(value)}")


def _type(value: Any) -> str:
    return type(value).__name__


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _prompt(sample: Sample) -> str:
    """The text of the last message before the answer."""
    return sample.messages[-1]["content"] if sample.messages else ""
