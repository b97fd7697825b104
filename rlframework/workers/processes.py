"""`ProcessWorkerGroup`: N worker processes on this machine, without Ray.

They are forked from a process that has already imported torch and transformers (multiprocessing's fork server), so a
group of small workers starts within a second. More workers than cores are allowed. The driver's program must guard its
entry point (`if __name__ == "__main__":`), as always with multiprocessing; a notebook has none. Functions and classes
that a worker cannot import, such as the loss of a notebook, are sent by value, as Ray sends them. Not supported: other
machines, other Python executables, restarts.

One thread per worker (`Peer`) starts the process, sends it one call at a time and receives the results. A worker can
therefore never block the driver, which waits for futures with a deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import linecache
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent import futures
from functools import partial, reduce
from multiprocessing import connection, forkserver, get_context
from multiprocessing.context import BaseContext
from queue import SimpleQueue
from types import CodeType, FunctionType
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]

from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers import dispatch, machine
from rlframework.workers.failures import HostFailure, unpicklable
from rlframework.workers.remote_group import RemoteWorkerGroup, WorkerHost

_LOG = logging.getLogger(__name__)

Reply = futures.Future[bytes | HostFailure]
"""A pickled result, or a failure."""

PRELOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.tokenization_utils_tokenizers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "rlframework.algorithms.losses",
    "rlframework.models.adapters",
    "rlframework.models.forward",
    "rlframework.models.loading",
    "rlframework.models.probing",
    "rlframework.models.load_balancing",
    "rlframework.policy.head.patch",
    "rlframework.policy.optimization",
    "rlframework.policy.checkpoint.sharded",
    "rlframework.policy.worker",
    "rlframework.generation.worker",
    "rlframework.workers.fork_server",
)
"""Imported by the process that workers are forked from: slow imports without side effects, except for the last."""

_START_LOCK = threading.Lock()
"""Processes start one at a time, because multiprocessing's list of children is not thread-safe."""
_END_WAIT = 5.0
_imported_with: list[dict[str, str]] = []
"""The variables of `machine.FORWARDED` as seen by the fork server's imports; empty before the server is started."""


class ProcessWorkerGroup(RemoteWorkerGroup):
    """One process per rank of `sharding`. A worker on CUDA sees only its own GPU, as device 0."""

    def _start(self, spec: WorkerSpec, device: str) -> None:
        self._peers: list[Peer] = []
        dispatch.reject_own_python(spec, "processes")
        self._replicas = spec.replicas
        self._gpus = gpus_of(spec, self._sharding.size) if device == "cuda" else []
        self._start_hosts(spec, device)
        contexts, shared = self._contexts(device), self._shared(spec)
        started = {rank: self._send(rank, "start", shared, context) for rank, context in enumerate(contexts)}
        self._wait(started, f"constructing {spec.target}", "start")

    def _start_hosts(self, spec: WorkerSpec, device: str) -> None:
        """Start a process for each rank."""
        method = _start_method()
        for rank in range(self._sharding.size):
            self._peers.append(self._peer(rank, method, self._environment(rank)))

    def _environment(self, rank: int) -> dict[str, str]:
        config, own = self._config, {"CUDA_VISIBLE_DEVICES": self._gpus[rank]} if self._gpus else {}
        workers = self._sharding.size * self._replicas
        given = machine.worker_environment(workers, config.environment, config.pass_environment)
        return machine.inherited_environment() | self._temporary.environment(given | own)

    def _peer(self, rank: int, method: BaseContext, environment: dict[str, str]) -> Peer:
        return Peer(rank, method, environment)

    def _call(self, rank: int, method: str, *args: Any) -> Callable[[], Reply]:
        return partial(self._peers[rank].send, _pickled((method, args)))

    def _notify(self) -> None:
        for peer in self._peers:
            peer.notify()

    def _shared(self, value: Any) -> Any:
        return _Pickled(value)

    def _wait_any(self, refs: Mapping[Any, int], timeout: float) -> list[Any]:
        return list(futures.wait(refs, timeout, return_when=futures.FIRST_COMPLETED).done)

    def _result(self, rank: int, ref: Any) -> Any:
        result = ref.result()
        if isinstance(result, HostFailure):
            return result
        try:
            return pickle.loads(result)  # noqa: S301 - from a process that this one started
        except Exception as error:  # noqa: BLE001 - a result that cannot be unpickled is a failure of that rank
            return HostFailure.of(error)

    def _when_done(self, rank: int, ref: Any, callback: Callable[[Any], None]) -> None:
        ref.add_done_callback(lambda done: callback(self._result(rank, done)))

    def _end_hosts(self) -> bool:
        for peer in self._peers:
            peer.kill()
        for peer in self._peers:
            peer.close()
        self._peers = []
        return True


def visible_gpus(workers: int) -> list[str]:
    """One GPU per worker, as named in CUDA_VISIBLE_DEVICES; raises `ConfigError` if there are too few."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    gpus = named.split(",")[:count] if named else [str(index) for index in range(count)]
    machine.check_gpus(workers, len(gpus))
    return gpus[:workers]


def gpus_of(spec: WorkerSpec, workers: int) -> list[str]:
    """The GPUs of each of `workers` workers, as CUDA_VISIBLE_DEVICES; raises like `visible_gpus`."""
    found, first = visible_gpus(workers * spec.replicas * spec.gpus), workers * spec.replica
    starts = [worker * spec.gpus for worker in range(first, first + workers)]
    return [",".join(found[start : start + spec.gpus]) for start in starts]


def _start_method() -> BaseContext:
    """The fork server, or a new interpreter if variables that the server's imports have read changed since."""
    now = {name: os.environ[name] for name in machine.FORWARDED if name in os.environ}
    if not _imported_with:
        _imported_with.append(now)
    if _imported_with != [now]:
        return get_context("spawn")
    server = get_context("forkserver")
    server.set_forkserver_preload(list(PRELOADED))  # read only before the server starts its first process
    return server


def _pickled(value: Any) -> bytes:
    """`value` as a pickle, with what is defined in `__main__` or in a function by value."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(value)
    except Exception as error:
        raise unpicklable(value, error) from error
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, which keeps the file and lines of code that it sends by value, for tracebacks.

    A class or function of a module is sent as a name, and workers import the module once. When the driver has reloaded
    the module, as notebooks do, they would go on with its earlier code: from then on it is sent by value. IPython's
    autoreload keeps classes and functions, and gives them the new code.
    """

    _sent: ClassVar[dict[tuple[str, str], tuple[weakref.ref[Any], list[CodeType]]]] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)):
            self._note_reload(value)
        if type(value) is not CodeType:
            return super().reducer_override(value)
        create, arguments = self.dispatch_table[CodeType](value)
        lines = [] if os.path.isfile(value.co_filename) else linecache.getlines(value.co_filename)  # of a cell
        return _code_of, (create, arguments, value.co_filename, lines)

    def _note_reload(self, value: Any) -> None:
        name, module = value.__qualname__, sys.modules.get(value.__module__)
        current: Any = reduce(lambda holder, part: getattr(holder, part, None), name.split("."), module)
        if current is not value or module is None or module.__name__ == "__main__":
            return
        members = vars(value).values() if isinstance(value, type) else (value,)
        codes = [member.__code__ for member in members if isinstance(member, FunctionType)]
        sent, earlier = self._sent.setdefault((module.__name__, name), (weakref.ref(value), codes))
        if sent() is not value or codes != earlier:
            cloudpickle.register_pickle_by_value(module)


def _code_of(create: Callable[..., CodeType], arguments: tuple[Any, ...], file: str, lines: list[str]) -> CodeType:
    if lines:
        linecache.cache[file] = (0, None, lines, file)
    return create(*arguments).replace(co_filename=file)


class _Pickled:
    """A value that is pickled once and sent to several workers."""

    def __init__(self, value: Any) -> None:
        self.data = _pickled(value)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


# -- one worker process -----------------------------------------------------------------------------------------------


class Peer:
    """The driver's end of the worker process `rank`, which has the variables of `environment` and no others."""

    def __init__(self, rank: int, method: BaseContext, environment: dict[str, str]) -> None:
        self._connection, self._worker_connection = connection.Pipe()
        self._worker_notices, self._notices = connection.Pipe(duplex=False)
        os.set_blocking(self._notices.fileno(), False)
        self._notices_lock = threading.Lock()  # a closed descriptor may be that of another file at once
        args = (self._worker_connection, self._worker_notices, environment, os.getcwd())
        self._process: Any = method.Process(target=serve, args=args, name=f"worker-{rank}")  # type: ignore[attr-defined]
        self._calls: SimpleQueue[tuple[Reply, bytes] | None] = SimpleQueue()
        self._has_replied = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"peer-{rank}", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> Reply:
        """Queue `message`, which is sent once the calls before it have returned."""
        reply: Reply = futures.Future()
        self._calls.put((reply, message))
        return reply

    def notify(self) -> None:
        """Send a notice beside the calls."""
        # not needed if the pipe is full of notices; a worker that has ended is reported by its call
        with self._notices_lock, contextlib.suppress(OSError):
            os.write(self._notices.fileno(), b"1")

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
        with self._notices_lock:
            self._notices.close()

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
            _LOG.debug("%s: started as process %d", self._process.name, self._process.pid)
        except Exception as error:  # noqa: BLE001 - every exception is reported as the failure of that rank
            reason = f"it could not be started ({type(error).__name__}: {error})"
            if "AF_UNIX path too long" in str(error):
                reason += f": set TMPDIR, {tempfile.gettempdir()!r}, to a shorter path, for example a folder in /tmp"
            return HostFailure((), reason, "", died=True)
        finally:
            self._worker_connection.close()
            self._worker_notices.close()
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
        _LOG.debug("%s: ended by itself, with exit code %s", self._process.name, code)
        names = {-each.value: f"killed by signal {each.name}" for each in signal.Signals}
        cause = names.get(code, f"exit code {code}")
        hint = "see its output on standard error"
        if code == -signal.SIGKILL:
            hint = "by somebody, or by the kernel if memory was short, which its log then says (dmesg)"
        if not self._has_replied:
            hint += '; a program that starts workers must do so under `if __name__ == "__main__":`'
        return HostFailure((), f"its process ended ({cause}); {hint}", "", died=True)

    def _kill_process(self) -> None:
        if self._process.pid is None or not self._process.is_alive():
            return
        _LOG.debug("%s: killing process %d", self._process.name, self._process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it may not lead its own process group yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()


def serve(
    link: connection.Connection, notices: connection.Connection, environment: dict[str, str], working_directory: str
) -> None:
    """The main function of a worker process: serve calls of `link` until the driver is gone."""
    os.setpgid(0, 0)  # so that processes started by the worker are killed with it
    _die_with_server()
    threading.Thread(target=_die_with_driver, name="driver-watch", daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):  # handled by the driver, which then ends its workers
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the fork server's, which it has looked up before
    os.chdir(working_directory)
    if "torch" in sys.modules and (threads := machine.threads_of(environment)):
        sys.modules["torch"].set_num_threads(threads)
    host = WorkerHost(partial(_has_notice, notices))
    _LOG.debug("%s: serving calls", multiprocessing.current_process().name)
    with contextlib.suppress(EOFError, OSError):  # the driver is gone
        while True:
            link.send_bytes(_reply_to(host, link.recv_bytes()))
    _LOG.debug("%s: ending, because the driver is gone", multiprocessing.current_process().name)


def _has_notice(notices: connection.Connection) -> bool:
    """Return whether there are notices, which are then read."""
    return notices.poll() and bool(os.read(notices.fileno(), 4096))


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
