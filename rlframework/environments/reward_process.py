"""Run a user's reward function in a separate process, which can be killed wherever it hangs.

A thread could not be stopped: a regular expression or a big integer holds Python's lock, and blocks the driver with it.
The process is a new interpreter that imports the function's module with the driver's `sys.path`, working directory and
environment variables: multiprocessing would run the user's program again. A function of the program itself (`__main__`:
a script or a notebook) cannot be imported, so it is sent by value, with the globals that it uses. The process serves
one request at a time and reports which answers it is working on: if it dies or is killed, only those fail, and a new
process scores the others. It leads a process group, which is killed with it, and exits with the driver.
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
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

from rlframework.environments.reward_calls import Failure, Report, RewardCalls, RewardResult, timed_out
from rlframework.errors import ConfigError, UserError
from rlframework.interfaces.environment import Sample
from rlframework.plugins.user_defined import load_reward

START_SECONDS = 300.0
"""Timeout for starting the interpreter and importing the function's module."""

GRACE_SECONDS = 2.0
"""Added to the timeout of async calls, which the process normally cancels itself."""

_POLL_SECONDS = 0.5
_STACK_LINES = 12
_PROGRAM = (  # not -m or PYTHONPATH: these would put the current directory before installed packages
    "import json, sys; sys.path[:], *arguments = json.loads(sys.argv[1]); "
    "from rlframework.environments.reward_process import main; main(*arguments)"
)


class RewardProcess:
    """Scores answers as `RewardCalls` does, in a process that is started on first use.

    Waits `timeout` seconds for each call that is not async.
    """

    def __init__(self, path: str, *, timeout: float, concurrency: int, is_async: bool) -> None:
        """Raise a `ConfigError` if the function is defined in the program itself and cannot be pickled."""
        self._path, self._timeout, self._is_async = path, timeout, is_async
        self._patience = timeout + (GRACE_SECONDS if is_async else 0.0)
        self._setup = _pickled(path, timeout if is_async else None, concurrency)
        self._child: _Child | None = None

    def score(self, samples: Sequence[Sample], completions: Sequence[str], report: Report) -> None:
        """See `RewardCalls.score`; `report` may raise to stop."""
        pending = list(range(len(samples)))
        while pending:
            started: set[int] = set()
            done: set[int] = set()
            child = self._running()
            finished = False
            try:
                child.send(([samples[number] for number in pending], [completions[number] for number in pending]))
                while (message := child.receive(self._patience)) is not None:
                    numbers = [pending[index] for index in message[0]]
                    (started if message[1] is None else done).update(numbers)
                    report(numbers, message[1])
                finished = True
            except (TimeoutError, EOFError) as error:
                lost = sorted(started - done) or [number for number in pending if number not in done][:1]
                done.update(lost)
                report(lost, [self._failure(child, error)] * len(lost))
            finally:
                if not finished:
                    self.close()
            pending = [number for number in pending if number not in done]

    def close(self) -> None:
        """Kill the process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def _running(self) -> _Child:
        if self._child is None or not self._child.is_alive:
            self.close()
            self._child = _Child(self._path, self._setup, self._patience)
        return self._child

    def _failure(self, child: _Child, error: Exception) -> Failure:
        if isinstance(error, EOFError):
            return Failure(str(error), str(error))
        late = timed_out(self._timeout, "it, or a call awaited with it," if self._is_async else "it")
        return Failure("\n".join([late.text, *child.stack()]), late.cause)


def _pickled(path: str, timeout: float | None, concurrency: int) -> bytes:
    """The arguments of `RewardCalls`; a function in the program itself is included with the globals that it uses."""
    import cloudpickle  # type: ignore[import-untyped]

    function = load_reward(path)[0] if path.startswith("__main__:") else None
    try:
        pickled: bytes = cloudpickle.dumps(
            {"path": path, "timeout": timeout, "concurrency": concurrency, "function": function}
        )
    except Exception as error:
        raise ConfigError(
            f"environment.reward={path!r} is defined in the program itself and uses values that cannot be sent to the "
            f"process it runs in ({type(error).__name__}: {error}); create them inside the function, put the function "
            "into a module, or set environment.reward_timeout=null"
        ) from error
    return pickled


class _Child:
    """The driver's side of one process."""

    def __init__(self, path: str, setup: bytes, patience: float) -> None:
        self._link, theirs = Pipe()
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115 - `kill` closes it
        descriptors = theirs.fileno(), self._stack.fileno()
        arguments = json.dumps([[os.path.abspath(entry) for entry in sys.path], *descriptors, patience])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, arguments],
                pass_fds=descriptors,
                process_group=0,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        self.kill = weakref.finalize(self, _kill, self._process, self._link, self._stack)
        """Kill the process and its process group; further calls do nothing."""
        try:
            self.send(setup)
            self.receive(START_SECONDS)
        except BaseException as error:
            self.kill()
            if not isinstance(error, (TimeoutError, EOFError, ConfigError)):
                raise
            reason = str(error) or f"its module was not imported within {START_SECONDS:g} s"
            raise ConfigError(
                f"environment.reward={path!r} cannot be used in a process of its own: {reason}. Set "
                "environment.reward_timeout=null to run it in this one"
            ) from error

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def send(self, message: Any) -> None:
        """Send `message`. Raises `EOFError` if the process has ended."""
        try:
            self._link.send(message)
        except OSError as error:
            raise EOFError(self._how_it_ended()) from error

    def receive(self, seconds: float) -> Any:
        """Return the next message; raise it if it is an error, `TimeoutError`, or `EOFError` if the process ended."""
        until = time.monotonic() + seconds
        while not self._link.poll(max(0.0, min(_POLL_SECONDS, until - time.monotonic()))):
            # a process that it started may hold the link open
            if not self.is_alive and not self._link.poll():
                raise EOFError(self._how_it_ended())
            if time.monotonic() >= until:
                raise TimeoutError
        try:
            message = self._link.recv()
        except (EOFError, OSError) as error:
            raise EOFError(self._how_it_ended()) from error
        if isinstance(message, UserError):
            raise message
        return message

    def stack(self) -> list[str]:
        """The stack of the user's code shortly before the timeout, innermost call first."""
        text = os.pread(self._stack.fileno(), 100_000, 0).decode(errors="replace")
        main_thread = text.rpartition("\n\n")[2].splitlines()
        frames = [line for line in main_thread if line.startswith("  File ")]
        ours = next((number for number, line in enumerate(frames) if "reward_calls.py" in line), len(frames))
        return ["where it was, most recent call first:", *frames[:ours][:_STACK_LINES]] if ours else []

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return f"the process that it ran in {how}; its output is on standard error"


def _kill(process: subprocess.Popen[bytes], link: Connection, stack: IO[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    link.close()
    stack.close()


def main(descriptor: int, stack: int, patience: float) -> None:
    """Entry point of the process. `descriptor` is its side of the link; its stack is dumped to the file `stack`."""
    for inherited in (descriptor, stack):
        os.set_inheritable(inherited, False)
    _exit_with(os.getppid())
    link = Connection(descriptor)

    def report(numbers: list[int], results: list[RewardResult] | None) -> None:
        os.ftruncate(stack, 0)
        os.lseek(stack, 0, os.SEEK_SET)
        faulthandler.dump_traceback_later(0.95 * patience, file=stack)
        link.send((numbers, results))

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the driver has exited
        try:
            calls = _calls(link.recv())
        except UserError as error:
            link.send(error)
            return
        link.send("ready")
        while True:
            samples, completions = link.recv()
            failure = None
            try:
                calls.score(samples, completions, report)
            except UserError as error:
                failure = error
            faulthandler.cancel_dump_traceback_later()
            link.send(failure)


def _calls(setup: bytes) -> RewardCalls:
    try:
        arguments = pickle.loads(setup)  # noqa: S301 - from the driver that started this process
    except Exception as error:
        raise ConfigError(
            f"{type(error).__name__} while the function and what it uses were unpickled: {error}"
        ) from error
    return RewardCalls(**arguments)


def _exit_with(driver: int) -> None:
    """Exit when the driver does; on Linux even while no thread of this process can run."""
    if sys.platform == "linux":
        parent_died = 1
        ctypes.CDLL(None).prctl(parent_died, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(_POLL_SECONDS)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="driver-watch", daemon=True).start()
