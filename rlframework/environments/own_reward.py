"""Score answers with a user's own reward function: `environment.reward: my_module:score`.

Failures of answers (see `reward_calls`) are counted, as `counted_failures` describes.

The function runs in a separate process, which can be killed wherever it hangs. A thread could not be stopped: a regular
expression or a big integer holds Python's lock, and blocks the driver with it. The process is a new interpreter that
imports the function's module with the driver's `sys.path`, working directory and environment variables: multiprocessing
would run the user's program again. A function of the program itself (`__main__`) is sent by value, with its globals.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any

from rlframework.base.errors import ConfigError, UserError
from rlframework.config.environments import DatasetConfig
from rlframework.environments.counted_failures import CountedFailures
from rlframework.environments.reward_arguments import TextColumns, arguments_of, missing_columns
from rlframework.environments.reward_calls import Failure, Report, RewardCalls, timed_out
from rlframework.interfaces.environment import Sample, StepOutcome
from rlframework.plugins.user_defined import load_reward

START_SECONDS = 300.0
"""Timeout for starting the interpreter and importing the function's module."""

GRACE_SECONDS = 2.0
"""Added to the timeout of async calls, which the process normally cancels itself."""

_LOG = logging.getLogger(__name__)

_STARTS = 2
"""Starts in a row that may end with the death of the process, after one that did not: as by a kernel without memory."""

_DUMP_SECONDS, _STACK_LINES = 0.2, 12
_PROGRAM = (  # not -m or PYTHONPATH: these would put the current directory before installed packages
    "import json, sys; sys.path[:], *descriptors = json.loads(sys.argv[1]); "
    "from rlframework.environments.reward_calls import serve; serve(*descriptors)"
)


class OwnReward:
    """Scores answers with the function that `environment.reward` names."""

    def __init__(
        self, config: DatasetConfig, path: str, key: str = "environment.reward", *, optional: bool = False
    ) -> None:
        """Load the function at `path`; a `ConfigError` that names `key` if it cannot be used. Starts no process yet.

        `optional`: there are other rewards, so the function may return None for answers that it is not for.
        """
        try:
            form = load_reward(path)[1]
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error
        self._name, self._form = f"{key}={path!r} ({form.place})", form
        self._counted = CountedFailures(config, self._name, optional=optional)
        timeout, limit = config.reward_timeout, config.reward_concurrency
        columns = TextColumns(config.columns.prompt, config.columns.answer)
        self._arguments = arguments_of(form, columns)
        self._calls: RewardCalls | RewardProcess
        self._thread: ThreadPoolExecutor | None = None
        if timeout is not None:
            self._calls = RewardProcess(path, columns, timeout=timeout, concurrency=limit, is_async=form.is_async)
        else:
            self._calls = RewardCalls(path, timeout=None, concurrency=limit, columns=columns)
            if form.is_async:  # in a thread, because this one may run another event loop
                self._thread = ThreadPoolExecutor(1, "reward")

    def check_columns(self, columns: Collection[str], source: str) -> None:
        """See `Reward`."""
        given = self._arguments.given(columns)
        if missing := [name for name in self._form.required if name not in given]:
            raise ConfigError(f"{self._name} {missing_columns(self._arguments, missing, given, source)}")

    def asked_of(self, sample: Sample) -> dict[str, Any]:
        """See `Reward`."""
        return self._arguments.asked_of(sample)

    def start(self, folder: Path | None) -> None:
        """Do nothing: the function's process starts on first use, and keeps no files."""

    def score(
        self, samples: Sequence[Sample], completions: Sequence[str], *, counted: bool = True
    ) -> list[StepOutcome]:
        """See `Reward`. The `UserError` has the first failure."""
        return self._counted.outcomes(samples, completions, self._score, counted=counted)

    def _score(self, samples: Sequence[Sample], completions: Sequence[str], report: Report) -> None:
        if self._thread is None:
            self._calls.score(samples, completions, report)
        else:
            self._thread.submit(self._calls.score, samples, completions, report).result()

    def close(self) -> None:
        """End the function's process or thread."""
        if self._thread is None:
            self._calls.close()
        else:
            self._thread.submit(self._calls.close).result()
            self._thread.shutdown()


class RewardProcess:
    """Scores answers as `RewardCalls` does, in a process that is started on first use and runs `reward_calls.serve`.

    The process reports which answers it is working on: if it dies, or takes more than `timeout` seconds for a call,
    only those fail, and a new process scores the others. It leads a process group, which is killed with it.
    """

    def __init__(self, path: str, columns: TextColumns, *, timeout: float, concurrency: int, is_async: bool) -> None:
        """See `RewardCalls`.

        Raises a `ConfigError` if the function is defined in the program itself and cannot be pickled.
        """
        import cloudpickle  # type: ignore[import-untyped]

        self._path, self._timeout, self._is_async = path, timeout, is_async
        self._patience = timeout + (GRACE_SECONDS if is_async else 0.0)
        self._process: subprocess.Popen[bytes] | None = None
        self._more_starts = 0
        function = load_reward(path)[0] if path.startswith("__main__:") else None
        setup = {"path": path, "timeout": timeout if is_async else None, "concurrency": concurrency, "columns": columns}
        try:
            self._setup: bytes = cloudpickle.dumps({**setup, "function": function})
        except Exception as error:
            raise ConfigError(
                f"environment.reward={path!r} is defined in the program itself and uses values that cannot be sent to "
                f"the process it runs in ({type(error).__name__}: {error}); create them inside the function, put the "
                "function into a module, or set environment.reward_timeout=null"
            ) from error

    def score(self, samples: Sequence[Sample], completions: Sequence[str], report: Report) -> None:
        """See `RewardCalls.score`; `report` may raise to stop."""
        pending = list(range(len(samples)))
        while pending:
            started: set[int] = set()
            done: set[int] = set()
            try:
                process = self._running()
                _LOG.debug("reward %s: sending %d answers to process %d", self._path, len(pending), process.pid)
                try:
                    self._link.send([[texts[number] for number in pending] for texts in (samples, completions)])
                    while (message := self._receive(self._patience)) is not None:
                        numbers = [pending[index] for index in message[0]]
                        (started if message[1] is None else done).update(numbers)
                        report(numbers, message[1])
                    _LOG.debug("reward %s: process %d has answered", self._path, process.pid)
                    return
                except (EOFError, OSError) as error:
                    lost = sorted(started - done) or [number for number in pending if number not in done][:1]
                    done.update(lost)
                    report(lost, [self._failure(process, error)] * len(lost))
                    self.close()
            except BaseException:
                self.close()
                raise
            pending = [number for number in pending if number not in done]

    def close(self) -> None:
        """Kill the process and its process group."""
        if self._process is not None:
            _LOG.debug("reward %s: killing process %d", self._path, self._process.pid)
            self._process = None
            self._kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._link, theirs = Pipe()
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115 - `_kill` closes it
        descriptors = theirs.fileno(), self._stack.fileno()
        with theirs:
            arguments = json.dumps([[os.path.abspath(entry) for entry in sys.path], *descriptors])
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, arguments],
                pass_fds=descriptors,
                process_group=0,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        _LOG.debug("reward %s: started as process %d", self._path, process.pid)
        self._kill = weakref.finalize(self, _kill, process, self._link, self._stack)
        try:
            self._link.send_bytes(self._setup)
            self._receive(START_SECONDS)
        except (EOFError, OSError, ConfigError) as error:
            if self._more_starts and not isinstance(error, (TimeoutError, ConfigError)):
                self._more_starts -= 1
                self.close()
                return self._running()
            if isinstance(error, TimeoutError):
                reason = f"its module was not imported within {START_SECONDS:g} s"
            else:
                reason = str(error) if isinstance(error, ConfigError) else _end(process)
            raise ConfigError(
                f"environment.reward={self._path!r} cannot be used in a process of its own: {reason}. Set "
                "environment.reward_timeout=null to run it in this one"
            ) from error
        self._more_starts = _STARTS
        return process

    def _receive(self, seconds: float) -> Any:
        """The next message, or error. Raises `TimeoutError`, and `EOFError` or `OSError` if the process has ended."""
        if not self._link.poll(seconds):
            raise TimeoutError
        message = self._link.recv()
        if isinstance(message, UserError):
            raise message
        return message

    def _failure(self, process: subprocess.Popen[bytes], error: Exception) -> Failure:
        if not isinstance(error, TimeoutError):
            return Failure(_end(process), _end(process))
        late = timed_out(self._timeout, "it, or a call awaited with it," if self._is_async else "it")
        process.send_signal(signal.SIGUSR1)  # it writes its stack
        time.sleep(_DUMP_SECONDS)
        text = os.pread(self._stack.fileno(), 100_000, 0).decode(errors="replace")
        frames = [line for line in text.splitlines() if line.startswith("  File ")]
        ours = next((number for number, line in enumerate(frames) if "reward_calls.py" in line), 0)
        stack = ["where it was, most recent call first:", *frames[:ours][:_STACK_LINES]] if ours else []
        return Failure("\n".join([late.text, *stack]), late.cause)


def _end(process: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    code = process.returncode or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"the process that it ran in {how}; its output is on standard error"


def _kill(process: subprocess.Popen[bytes], link: Connection, stack: IO[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    link.close()
    stack.close()
