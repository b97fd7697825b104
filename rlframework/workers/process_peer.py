"""A worker process of a `ProcessWorkerGroup` (`serve`), and the driver's end of it (`Peer`).

One thread per worker starts the process, sends it one call at a time and receives the results. A worker can therefore
never block the driver, which waits for futures with a deadline.
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
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.context import BaseContext
from queue import SimpleQueue
from typing import Any

from rlframework.workers.failures import HostFailure
from rlframework.workers.worker_host import WorkerHost

Reply = Future[bytes | HostFailure]
"""A pickled result, or a failure."""

_START_LOCK = threading.Lock()
"""Processes start one at a time, because multiprocessing's list of children is not thread-safe."""
_END_WAIT = 5.0


@dataclass(frozen=True)
class ProcessEnvironment:
    """The settings of a worker process: environment variables, working directory and number of torch threads."""

    variables: dict[str, str]
    working_directory: str
    threads: int


class Peer:
    """The driver's end of the worker process `rank`."""

    def __init__(self, rank: int, method: BaseContext, process_environment: ProcessEnvironment) -> None:
        self._connection, self._worker_connection = connection.Pipe()
        self._process: Any = method.Process(  # type: ignore[attr-defined]
            target=serve, args=(self._worker_connection, process_environment), name=f"worker-{rank}"
        )
        self._calls: SimpleQueue[tuple[Reply, bytes] | None] = SimpleQueue()
        self._has_replied = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"peer-{rank}", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> Reply:
        """Queue `message`, which is sent once the calls before it have returned."""
        reply: Reply = Future()
        self._calls.put((reply, message))
        return reply

    def kill(self) -> None:
        """Kill the process and its children."""
        self._ended = True
        self._calls.put(None)
        self._kill_process()

    def close(self) -> None:
        """After `kill`: wait until the process is gone, and release its resources."""
        self._thread.join(_END_WAIT)
        if self._thread.is_alive():  # blocked while starting the process, which it kills as soon as it is up
            return
        if self._process.pid is not None:
            self._process.join(_END_WAIT)
            with contextlib.suppress(ValueError):  # not even SIGKILL has ended it yet; the group checks process ids
                self._process.close()
        self._connection.close()

    def _run(self) -> None:
        failure = self._start_process()
        while (call := self._calls.get()) is not None:
            reply, message = call
            result = failure or self._exchange(message)
            if isinstance(result, HostFailure):
                failure = result  # the process is gone, so all later calls fail in the same way
            reply.set_result(result)

    def _start_process(self) -> HostFailure | None:
        try:
            with _START_LOCK:
                self._process.start()
        except Exception as error:  # noqa: BLE001 - every exception is reported as the failure of that rank
            cause = f"it could not be started ({type(error).__name__}: {error})"
            return HostFailure((), cause, "", died=True)
        finally:
            self._worker_connection.close()
        if self._ended:
            self._kill_process()
        return None

    def _exchange(self, message: bytes) -> bytes | HostFailure:
        try:
            self._connection.send_bytes(message)
            # also watch the process itself: a child that it left behind may keep the connection open
            connection.wait([self._connection, self._process.sentinel])
            if self._connection.poll():
                result = self._connection.recv_bytes()
                self._has_replied = True
                return result
        except (EOFError, OSError):
            pass
        return self._describe_death()

    def _describe_death(self) -> HostFailure:
        self._process.join(1.0)
        code = self._process.exitcode
        names = {-each.value: f"killed by signal {each.name}" for each in signal.Signals}
        cause = names.get(code, f"exit code {code}")
        hint = "see its output on standard error"
        if not self._has_replied:
            hint += '; a program that starts workers must do so under `if __name__ == "__main__":`'
        return HostFailure((), f"its process ended ({cause}); {hint}", "", died=True)

    def _kill_process(self) -> None:
        if self._process.pid is None or not self._process.is_alive():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it may not lead its own process group yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()


def serve(link: connection.Connection, process_environment: ProcessEnvironment) -> None:
    """The main function of a worker process: serve calls until the driver is gone."""
    os.setpgid(0, 0)  # so that processes started by the worker are killed with it
    _die_with_server()
    threading.Thread(target=_die_with_driver, name="driver-watch", daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):  # handled by the driver, which then ends its workers
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(process_environment.variables)
    os.chdir(process_environment.working_directory)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(process_environment.threads)
    host = WorkerHost()
    while True:
        try:
            message = link.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            link.send_bytes(_reply_to(host, message))
        except OSError:  # the driver is gone
            return


def _reply_to(host: WorkerHost, message: bytes) -> bytes:
    try:
        method, args = pickle.loads(message)  # noqa: S301 - from the driver that started this process
        return pickle.dumps(getattr(host, method)(*args), protocol=5)
    except Exception as error:  # noqa: BLE001 - every exception is sent to the driver
        return pickle.dumps(HostFailure.of(error), protocol=5)


def _die_with_driver() -> None:
    """Kill this process and its children as soon as the driver ends, for any reason. Runs in its own thread."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    connection.wait([driver.sentinel])
    os.killpg(0, signal.SIGKILL)


def _die_with_server() -> None:
    """The same if threads are blocked: Linux kills this process with the fork server, which ends with the driver.

    The server ends once its pipe is closed everywhere, so this process closes the end that it inherited.
    """
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    server: Any = forkserver._forkserver
    pipe = getattr(server, "_forkserver_alive_fd", None)
    if pipe is not None:
        server._forkserver_alive_fd = None
        os.close(pipe)
