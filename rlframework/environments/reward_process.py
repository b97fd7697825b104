"""A process for a user's reward function: what hangs in it can be ended, whatever it hangs in.

A thread could not be: a regular expression or a big number holds Python's lock, and the driver with it. The process is
a new interpreter that imports the function's module itself, with the driver's `sys.path`, folder and environment
variables. It answers one request at a time and says when it begins with which answers, so that only those fail when it
is ended or dies; the others go to a new process. It leads a process group of its own, which is ended with it, and ends
when the driver does.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import IO, TYPE_CHECKING, Any

from rlframework.environments.reward_calls import Failure, Judged, RewardCalls, Tell, too_long
from rlframework.errors import ConfigError, UserError

if TYPE_CHECKING:
    from rlframework.interfaces.environment import Sample

START = 300.0
"""Seconds for a new interpreter and the import of the function's module."""

GRACE = 2.0
"""Seconds more for async calls, which the process ends itself where it can."""

_SLICE = 0.5
_LINES = 12
_PROGRAM = (  # the current directory does not go before what is installed, as it would with -m or PYTHONPATH
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlframework.environments.reward_process import main; main(*map(int, sys.argv[2:]))"
)


@dataclass(frozen=True)
class RewardJob:
    """The function by its import path, and how it is called."""

    path: str
    timeout: float
    concurrency: int
    is_async: bool

    @property
    def patience(self) -> float:
        """Seconds without a word from the process."""
        return self.timeout + (GRACE if self.is_async else 0.0)


class RewardProcess:
    """Has answers judged as `RewardCalls` does, in a process that is started when it is first needed."""

    def __init__(self, job: RewardJob) -> None:
        if job.path.startswith("__main__:"):
            raise ConfigError(
                f"environment.reward={job.path!r} is in the program itself, which another process cannot import: put "
                "it into a module of its own, or set environment.reward_timeout=null"
            )
        self._job = job
        self._child: _Child | None = None

    def judge(self, samples: Sequence[Sample], completions: Sequence[str], tell: Tell) -> None:
        """See `RewardCalls.judge`; `tell` may raise to stop."""
        left = list(range(len(samples)))
        while left:
            request = [samples[number] for number in left], [completions[number] for number in left]
            left = self._round(left, request, tell)

    def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _round(self, left: list[int], request: Any, tell: Tell) -> list[int]:
        """Have the answers of these numbers judged; those that are still left when the process ended on the way."""
        begun: set[int] = set()
        done: set[int] = set()

        def hear(indices: list[int], judged: list[Judged] | None) -> None:
            numbers = [left[index] for index in indices]
            (begun if judged is None else done).update(numbers)
            tell(numbers, judged)

        failure = self._ask(request, hear)
        if failure is not None:
            lost = sorted(begun - done) or [number for number in left if number not in done][:1]
            done.update(lost)
            tell(lost, [failure] * len(lost))
        return [number for number in left if number not in done]

    def _ask(self, request: Any, hear: Tell) -> Failure | None:
        """Why the process ended before it answered all, or None."""
        if self._child is None or not self._child.is_alive:
            self.close()
            self._child = _Child(self._job)
        whole = False
        try:
            self._child.send(request)
            while (message := self._child.receive(self._job.patience)) is not None:
                hear(*message)
            whole = True
        except TimeoutError:
            late = too_long(self._job.timeout, "it, or what it was awaited with," if self._job.is_async else "it")
            return Failure("\n".join([late.text, *self._child.where_it_is()]), late.cause)
        except EOFError as error:
            return Failure(str(error), str(error))
        finally:
            if not whole:
                self.close()
        return None


class _Child:
    """The driver's end of one process."""

    def __init__(self, job: RewardJob) -> None:
        self._link, theirs = Pipe()
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        descriptors = theirs.fileno(), self._stack.fileno()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, path, *map(str, descriptors)],
                pass_fds=descriptors,
                process_group=0,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        self.end = weakref.finalize(self, _end, self._process, self._link, self._stack)
        """Kill the process and those that it started; once."""
        try:
            self.send(job)
            self.receive(START)
        except BaseException as error:
            self.end()
            if not isinstance(error, (TimeoutError, EOFError, ConfigError)):
                raise
            reason = str(error) or f"its module was not imported within {START:g} s"
            raise ConfigError(
                f"environment.reward={job.path!r} cannot be used in a process of its own: {reason}. With "
                "environment.reward_timeout=null the function runs in this one"
            ) from error

    @property
    def is_alive(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def send(self, message: Any) -> None:
        """`EOFError` where the process is gone."""
        try:
            self._link.send_bytes(pickle.dumps(message, protocol=5))
        except OSError as error:
            raise EOFError(self._how_it_ended()) from error

    def receive(self, seconds: float) -> Any:
        """The next message; raised where it is an error. `TimeoutError`, and `EOFError` where the process ended."""
        self._wait(seconds)
        try:
            message = pickle.loads(self._link.recv_bytes())  # noqa: S301 - from a process that this one started
        except (EOFError, OSError) as error:
            raise EOFError(self._how_it_ended()) from error
        if isinstance(message, UserError):
            raise message
        return message

    def where_it_is(self) -> list[str]:
        """The lines of the user's code that it was at when patience ended, the innermost first."""
        text = os.pread(self._stack.fileno(), 100_000, 0).decode(errors="replace")
        main_thread = text.rpartition("\n\n")[2].splitlines()
        frames = [line for line in main_thread if line.startswith("  File ")]
        ours = next((number for number, line in enumerate(frames) if "reward_calls.py" in line), len(frames))
        return ["where it was, most recent call first:", *frames[:ours][:_LINES]] if ours else []

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._link.poll(max(0.0, min(_SLICE, until - time.monotonic()))):
            # processes that it left behind may hold the link open
            if not self.is_alive and not self._link.poll():
                raise EOFError(self._how_it_ended())
            if time.monotonic() >= until:
                raise TimeoutError

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return f"the process that it ran in {how}; what it said is on standard error"


def _end(process: subprocess.Popen[bytes], link: Connection, stack: IO[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    link.close()
    stack.close()


def main(descriptor: int, stack: int) -> None:
    """The life of the process: `descriptor` is its end of the link, where it is goes into the file `stack`."""
    for inherited in (descriptor, stack):
        os.set_inheritable(inherited, False)
    _die_with(os.getppid())
    link = Connection(descriptor)

    def send(message: Any) -> None:
        link.send_bytes(pickle.dumps(message, protocol=5))

    job: RewardJob = pickle.loads(link.recv_bytes())  # noqa: S301 - from the driver that started this process
    try:
        calls = RewardCalls(job.path, timeout=job.timeout if job.is_async else None, concurrency=job.concurrency)
    except UserError as error:
        send(error)
        return
    send("ready")

    def tell(numbers: list[int], judged: list[Judged] | None) -> None:
        os.ftruncate(stack, 0)
        os.lseek(stack, 0, os.SEEK_SET)
        faulthandler.dump_traceback_later(0.95 * job.patience, file=stack)
        send((numbers, judged))

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the driver is gone
        while True:
            samples, completions = pickle.loads(link.recv_bytes())  # noqa: S301 - as above
            send(_answer(calls, samples, completions, tell))


def _answer(calls: RewardCalls, samples: Sequence[Sample], completions: Sequence[str], tell: Tell) -> UserError | None:
    try:
        calls.judge(samples, completions, tell)
    except UserError as error:
        return error
    finally:
        faulthandler.cancel_dump_traceback_later()
    return None


def _die_with(driver: int) -> None:
    """Have this process end when the driver does; on Linux also when no thread of it can run."""
    if sys.platform == "linux":
        parent_died = 1
        ctypes.CDLL(None).prctl(parent_died, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(_SLICE)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="driver-watch", daemon=True).start()
