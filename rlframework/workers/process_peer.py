"""One worker process of a `ProcessWorkerGroup`: its life, and the driver's end of it.

A thread for each worker starts the process, sends it one call at a time and takes the answers, so that nothing that a
worker does or leaves undone can hold up the driver, which waits for `Answers` with a deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.context import BaseContext
from queue import SimpleQueue
from typing import Any

from rlframework.workers.failures import HostFailure
from rlframework.workers.worker_host import WorkerHost

Ref = tuple[int, int]
"""A rank, and the number of its call."""

_STARTING = threading.Lock()
"""One process at a time is started: multiprocessing's book of children is not made for several threads."""
_END_WAIT = 5.0


@dataclass(frozen=True)
class Surroundings:
    """What a worker process takes from the driver as it is now: environment variables, folder, threads."""

    environment: dict[str, str]
    folder: str
    threads: int


class Answers:
    """What came back, until it is asked for."""

    def __init__(self) -> None:
        self._there: dict[Ref, bytes | HostFailure] = {}
        self._changed = threading.Condition()

    def put(self, ref: Ref, answer: bytes | HostFailure) -> None:
        """Called by the threads."""
        with self._changed:
            self._there[ref] = answer
            self._changed.notify_all()

    def wait(self, refs: Sequence[Ref], timeout: float) -> list[Ref]:
        """Those of `refs` that are there, as soon as there are any; none after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: any(ref in self._there for ref in refs), min(timeout, threading.TIMEOUT_MAX))
            return [ref for ref in refs if ref in self._there]

    def take(self, ref: Ref) -> Any:
        """The answer, unpickled in the thread of the caller."""
        with self._changed:
            answer = self._there.pop(ref)
        if isinstance(answer, HostFailure):
            return answer
        try:
            return pickle.loads(answer)  # noqa: S301 - from a process that this one started
        except Exception as error:  # noqa: BLE001 - what cannot be read here is a failure of that rank
            return HostFailure.of(error)


class Peer:
    """The driver's end of the worker process `rank`."""

    def __init__(self, rank: int, method: BaseContext, surroundings: Surroundings, answers: Answers) -> None:
        self._rank = rank
        self._answers = answers
        self._link, self._theirs = connection.Pipe()
        self._process: Any = method.Process(  # type: ignore[attr-defined]
            target=serve, args=(self._theirs, surroundings), name=f"worker-{rank}"
        )
        self._calls: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._asked = 0
        self._heard = False
        self._ended = False
        self._thread = threading.Thread(target=self._live, name=f"peer-{rank}", daemon=True)
        self._thread.start()

    def ask(self, message: bytes) -> Ref:
        """Have `message` sent when the calls before it are answered."""
        self._asked += 1
        self._calls.put((self._asked, message))
        return self._rank, self._asked

    def serve_next(self, answers: Answers) -> None:
        """Give what is asked from now on to `answers`, of another group."""
        self._answers = answers

    def kill(self) -> None:
        """End the process and those that it started itself."""
        self._ended = True
        self._calls.put(None)
        self._kill_process()

    def close(self) -> None:
        """Wait, after `kill`, until the process is gone, and let go of what was held for it."""
        self._thread.join(_END_WAIT)
        if self._thread.is_alive():  # it hangs in starting a process, and ends that as soon as there is one
            return
        if self._process.pid is not None:
            self._process.join(_END_WAIT)
            with contextlib.suppress(ValueError):  # not even SIGKILL ended it yet: told by who looks at the ids
                self._process.close()
        self._link.close()

    def _live(self) -> None:
        failure = self._begin()
        while (call := self._calls.get()) is not None:
            number, message = call
            answer = failure or self._exchange(message)
            if isinstance(answer, HostFailure):
                failure = answer  # a process that is gone fails all calls after it alike
            self._answers.put((self._rank, number), answer)

    def _begin(self) -> HostFailure | None:
        try:
            with _STARTING:
                self._process.start()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told as the failure of that rank
            cause = f"it could not be started ({type(error).__name__}: {error})"
            return HostFailure((), cause, "", died=True)
        finally:
            self._theirs.close()
        if self._ended:
            self._kill_process()
        return None

    def _exchange(self, message: bytes) -> bytes | HostFailure:
        try:
            self._link.send_bytes(message)
            # the process's end is watched too: a process that it left behind may hold the link open
            connection.wait([self._link, self._process.sentinel])
            if self._link.poll():
                answer = self._link.recv_bytes()
                self._heard = True
                return answer
        except (EOFError, OSError):
            pass
        return self._death()

    def _death(self) -> HostFailure:
        self._process.join(1.0)
        code = self._process.exitcode
        cause = f"killed by signal {_signal_name(-code)}" if code is not None and code < 0 else f"exit code {code}"
        hint = "what it said is on standard error"
        if not self._heard:
            hint += '; a program that starts workers must do so under `if __name__ == "__main__":`'
        return HostFailure((), f"its process ended ({cause}); {hint}", "", died=True)

    def _kill_process(self) -> None:
        if self._process.pid is None or not self._process.is_alive():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it leads a group of its own by now, or not yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def serve(link: connection.Connection, surroundings: Surroundings) -> None:
    """The life of a worker process: answer calls until the driver is gone."""
    os.setpgid(0, 0)  # processes that the worker starts are ended with it
    _die_with_server()
    threading.Thread(target=_die_with_driver, name="driver-watch", daemon=True).start()
    for told in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C and a job's end are for the driver, which ends these
        signal.signal(told, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(surroundings.environment)
    os.chdir(surroundings.folder)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(surroundings.threads)
    host = WorkerHost()
    while True:
        try:
            message = link.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            link.send_bytes(_answer(host, message))
        except OSError:  # the driver is gone
            return


def _answer(host: WorkerHost, message: bytes) -> bytes:
    try:
        method, args = pickle.loads(message)  # noqa: S301 - from the driver that started this process
    except Exception as error:  # noqa: BLE001 - such as a class that cannot be imported here; goes to the driver
        return _dumped(HostFailure.of(error))
    answer = getattr(host, method)(*args)
    try:
        return _dumped(answer)
    except Exception as error:  # noqa: BLE001 - an answer that cannot be pickled; goes to the driver
        return _dumped(HostFailure.of(error))


def _dumped(answer: Any) -> bytes:
    return pickle.dumps(answer, protocol=5)


def _die_with_driver() -> None:
    """A thread's life: when the driver ends, however it does, this process does and those that it started."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    connection.wait([driver.sentinel])
    os.killpg(0, signal.SIGKILL)


def _die_with_server() -> None:
    """The same for a process that lets no thread run: Linux ends it with the fork server, which ends with the driver.

    The server does so when nobody holds its pipe any more, and each process forked from it is given the pipe.
    """
    if sys.platform != "linux":
        return
    parent_died, no_more = 1, signal.SIGKILL
    ctypes.CDLL(None).prctl(parent_died, no_more)
    server: Any = forkserver._forkserver
    pipe = getattr(server, "_forkserver_alive_fd", None)
    if pipe is not None:
        server._forkserver_alive_fd = None
        os.close(pipe)
