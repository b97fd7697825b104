"""The Ray actors that host a worker in its process.

`RayWorkerHost` is the `WorkerHost` of `RayRemoteWorkerGroup`. `WorkerActor` hosts a worker of a `RayWorkerBuilder`,
which need not know rlframework: its rank is in environment variables, set before its module is imported, and its
exceptions are raised in the driver as Ray raises them. Ray itself is not imported: the classes become actors where they
are started.
"""

from __future__ import annotations

import builtins
import inspect
import os
import pickle
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlframework.errors import RLFrameworkError, WorkerError
from rlframework.logs import log_to_stderr
from rlframework.workers import machine
from rlframework.workers.failures import HostFailure
from rlframework.workers.ports import PortReserver
from rlframework.workers.ray import transport
from rlframework.workers.ray.worker_class import Configuration, Description, configuration, describe, find_class
from rlframework.workers.worker_host import WorkerHost

BARE = "bare"
"""Value of `wants_result` for a call with several returns: the result is not packed, so that Ray can split it."""
FAILURE = "rlframework_failure"
"""Attribute of a raised exception with the `HostFailure` that describes the original one in the worker."""


PackedCall = tuple[str, bool | str, Sequence[str | None], list[Any], Sequence[int]]
"""A call: method name, `wants_result`, argument names (None: positional), argument values, and the positions of the
values that are passed separately because they are in Ray's store."""


class RayWorkerHost(WorkerHost):
    """A `WorkerHost` that packs its results, see `transport`. Ray unpacks its arguments."""

    def call_packed(self, packed: tuple[str, bool, Sequence[str], list[Any], Sequence[int]], *stored: Any) -> Any:
        """`WorkerHost.call` with packed arguments; `stored` are the values for the positions at their end."""
        method_name, wants_result, names, values, positions = packed
        for position, value in zip(positions, stored, strict=True):
            values[position] = value
        result = self.call(method_name, wants_result, names, *values)
        if isinstance(result, HostFailure) or not transport.is_worth_packing(result):
            return result
        try:
            return transport.Packed(result)
        except TypeError as error:
            return HostFailure.of(error)


class WorkerActor:
    """Hosts one worker. Cheap to construct; `load` imports its class, `construct` constructs it.

    With a `path`, the constructor does both, so that no call can precede them; the other arguments are those of
    `construct`. A call raises the worker's exceptions as classes that every process knows, see `portable`.
    """

    def __init__(self, path: str = "", *construct: Any) -> None:
        log_to_stderr()
        self._path = ""
        self._class: type | None = None
        self._worker: Any = None
        self._error: Exception | None = None
        self._ports = PortReserver()
        if path:
            try:
                self.load(path, {})
                self.construct(*construct)
            except Exception as error:  # noqa: BLE001 - raised by every call
                self._error = error

    def __repr__(self) -> str:
        return repr(self._worker) if self._worker is not None else f"WorkerActor({self._path})"

    def pid(self) -> tuple[int, str]:
        """The process id and its `machine.identity`. A reply also shows that the process is up."""
        return os.getpid(), machine.identity()

    def reserve_address(self, address: str) -> tuple[str, int]:
        """Return `address`, an address of this machine, and a port that this process reserves there; see `ports`."""
        return address, self._ports.reserve(address)

    def load(self, path: str, environment: Mapping[str, str], listen_at: str = "") -> Description:
        """Set the environment variables, then import and describe the class.

        `listen_at` is the address at which other machines reach this one.
        """
        os.environ.update(environment)
        if listen_at and "GLOO_SOCKET_IFNAME" not in os.environ and (name := machine.interface_of(listen_at)):
            os.environ["GLOO_SOCKET_IFNAME"] = name  # else gloo listens at the address that the host name resolves to
        self._path = path
        with _raises_portable():
            self._class, _ = find_class(path)
            return describe(path)

    def configure(
        self, workers: Sequence[tuple[float, tuple[int, list[int]] | None]], num_gpus_per_node: int
    ) -> list[Configuration]:
        """Call `configure_worker` for each worker, given as its fraction of a GPU and its bundles."""
        with _raises_portable():
            return [configuration(self._path, *each, num_gpus_per_node) for each in workers]

    def construct(self, extra: Mapping[str, Any], names: Sequence[str | None], *values: Any) -> None:
        """Construct the worker; keywords in `extra` take precedence. If this raises, every later call does too."""
        args, kwargs = _arguments(names, values)
        if self._class is None:
            raise WorkerError("construct was called before load")
        try:
            with _raises_portable():
                self._worker = self._class(*args, **(kwargs | dict(extra)))
        except Exception as error:
            self._error = error
            raise

    def call(self, asked: PackedCall, *stored: Any) -> Any:
        """Call the worker; return its packed result, None if it is not wanted, or with `BARE` the result itself."""
        method_name, wants_result, args, kwargs = _unpacked(asked, stored)
        with _raises_portable():
            result = getattr(self._require_worker(), method_name)(*args, **kwargs)
            return _wanted(result, wants_result)

    def stream(self, asked: PackedCall, *stored: Any) -> Iterator[Any]:
        """Call a generator method of the worker."""
        method_name, _, args, kwargs = _unpacked(asked, stored)
        with _raises_portable():
            for each in getattr(self._require_worker(), method_name)(*args, **kwargs):
                yield _packed(each)

    def _require_worker(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._worker


class AsyncWorkerActor(WorkerActor):
    """A `WorkerActor` for a class with coroutines: its calls run concurrently in one event loop."""

    async def call(self, asked: PackedCall, *stored: Any) -> Any:
        """Call the worker; await the result of a coroutine."""
        method_name, wants_result, args, kwargs = _unpacked(asked, stored)
        with _raises_portable():
            result = getattr(self._require_worker(), method_name)(*args, **kwargs)
            result = await result if inspect.isawaitable(result) else result
            return _wanted(result, wants_result)

    async def stream(self, asked: PackedCall, *stored: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        """Call a generator or asynchronous generator method of the worker."""
        method_name, _, args, kwargs = _unpacked(asked, stored)
        with _raises_portable():
            results = getattr(self._require_worker(), method_name)(*args, **kwargs)
            if hasattr(results, "__aiter__"):
                async for each in results:
                    yield _packed(each)
            else:
                for each in results:
                    yield _packed(each)


@contextmanager
def _raises_portable() -> Iterator[None]:
    """Convert exceptions raised in the body with `portable`."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - every exception is sent to the driver
        raise portable(error) from None


def portable(error: Exception) -> Exception:
    """Convert `error` to an exception that the driver can unpickle without importing the worker's modules.

    Its class is the most derived base class of `error` that is a built-in or an rlframework error. It keeps the
    traceback, and its attribute `FAILURE` describes the original exception.
    """
    if hasattr(error, FAILURE):
        return error
    failure = HostFailure.of(error)
    raised = _known(error)
    setattr(raised, FAILURE, failure)
    return raised.with_traceback(error.__traceback__)


def _known(error: Exception) -> Exception:
    kind = type(error)
    if _is_everywhere(kind) and _pickles(error):
        return error
    text = str(error) if _is_everywhere(kind) else f"{kind.__module__}.{kind.__qualname__}: {error}"
    for base in kind.__mro__:
        if _is_everywhere(base) and base not in (Exception, BaseException, object):
            try:
                known = base(text)
            except TypeError:  # its constructor needs more arguments, like that of UnicodeDecodeError
                continue
            if isinstance(known, Exception) and _pickles(known):
                return known
    return RuntimeError(text)


def _is_everywhere(kind: type) -> bool:
    if kind.__module__ == "builtins":
        return getattr(builtins, kind.__name__, None) is kind
    return issubclass(kind, RLFrameworkError) and kind.__module__.startswith("rlframework.")


def _pickles(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301 - pickled on the same line
    except Exception:  # noqa: BLE001 - any exception means that this error cannot be sent
        return False


def _wanted(result: Any, wants_result: bool | str) -> Any:
    if wants_result == BARE:
        return result
    return _packed(result) if wants_result else None


def _packed(result: Any) -> Any:
    return transport.Packed(result) if transport.is_worth_packing(result) else result


def _unpacked(asked: PackedCall, stored: Sequence[Any]) -> tuple[str, bool | str, list[Any], dict[str, Any]]:
    method_name, wants_result, names, values, positions = asked
    for position, value in zip(positions, stored, strict=True):
        values[position] = value
    return method_name, wants_result, *_arguments(names, values)


def _arguments(names: Sequence[str | None], values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    named = list(zip(names, values, strict=True))
    return [value for name, value in named if name is None], {name: value for name, value in named if name is not None}
