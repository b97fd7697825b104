"""What runs in a worker's process around a worker of a `RayWorkerBuilder`: finds its class, tells of it, calls it.

Light, and Ray is not imported here: `WorkerActor` becomes an actor where it is started. It differs from `WorkerHost` in
that the worker knows nothing of rlframework: who it is stands in environment variables, set before its module is
imported, and what it raises is raised in the driver as Ray does it.
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
from rlframework.workers import machine
from rlframework.workers.failures import HostFailure
from rlframework.workers.ports import PortKeeper
from rlframework.workers.ray import transport
from rlframework.workers.ray.worker_class import Configuration, Description, configuration, describe, find_class

BARE = "bare"
"""How a result is wanted that Ray itself takes apart, because there are several returns."""
FAILURE = "rlframework_failure"
"""The attribute of an exception that says what was raised in the worker: a `HostFailure`."""


Asked = tuple[str, bool | str, Sequence[str | None], list[Any], Sequence[int]]
"""A call: the method, how its result is wanted, names of arguments (None: positional) and their values; and at which
places of these stand the objects that Ray had in its store."""


class WorkerActor:
    """Holds one worker. Cheap to construct; `load` imports its class, `construct` makes the worker.

    With a `path` it does both at once, so that no call can come before; the rest are the arguments of `construct`. What
    the worker raises is raised by the call, as a class that every process knows: see `portable`.
    """

    def __init__(self, path: str = "", *construct: Any) -> None:
        self._path = ""
        self._class: type | None = None
        self._worker: Any = None
        self._broken: Exception | None = None
        self._ports = PortKeeper()
        if path:
            try:
                self.load(path, {})
                self.construct(*construct)
            except Exception as error:  # noqa: BLE001 - every call tells it
                self._broken = error

    def __repr__(self) -> str:
        return repr(self._worker) if self._worker is not None else f"WorkerActor({self._path})"

    def pid(self) -> tuple[int, str]:
        """The process id and its machine's `machine.identity`; an answer also says that the process is up."""
        return os.getpid(), machine.identity()

    def reserve_address(self, address: str) -> tuple[str, int]:
        """`address`, one of this machine's, and a port there that this process keeps; see `ports`."""
        return address, self._ports.keep(address)

    def load(self, path: str, environment: Mapping[str, str], listen_at: str = "") -> Description:
        """Set the environment variables, then import the class. `listen_at`: this machine's address for the others."""
        os.environ.update(environment)
        if listen_at and "GLOO_SOCKET_IFNAME" not in os.environ and (name := machine.interface_of(listen_at)):
            os.environ["GLOO_SOCKET_IFNAME"] = name  # else it listens where the name of the host happens to lead
        self._path = path
        with _told():
            self._class, _ = find_class(path)
            return describe(path)

    def configure(
        self, asked: Sequence[tuple[float, tuple[int, list[int]] | None]], num_gpus_per_node: int
    ) -> list[Configuration]:
        """What `configure_worker` says for each worker, given as its share of a GPU and its bundles."""
        with _told():
            return [configuration(self._path, *each, num_gpus_per_node) for each in asked]

    def construct(self, extra: Mapping[str, Any], names: Sequence[str | None], *values: Any) -> None:
        """Make the worker; every later call fails with what this raises. `extra` keywords win."""
        args, kwargs = _arguments(names, values)
        if self._class is None:
            raise WorkerError("load comes before construct")
        try:
            with _told():
                self._worker = self._class(*args, **(kwargs | dict(extra)))
        except Exception as error:
            self._broken = error
            raise

    def call(self, asked: Asked, *stored: Any) -> Any:
        """Call the worker; the result, or None where it is not wanted, to save its way; or as it is, if `BARE`."""
        method_name, wants_result, args, kwargs = _unpacked(asked, stored)
        with _told():
            result = getattr(self._there(), method_name)(*args, **kwargs)
            return _wanted(result, wants_result)

    def stream(self, asked: Asked, *stored: Any) -> Iterator[Any]:
        """Call a method of the worker that yields."""
        method_name, _, args, kwargs = _unpacked(asked, stored)
        with _told():
            for each in getattr(self._there(), method_name)(*args, **kwargs):
                yield _packed(each)

    def _there(self) -> Any:
        if self._broken is not None:
            raise self._broken
        return self._worker


class AsyncWorkerActor(WorkerActor):
    """The same for a class that has coroutines: its calls run concurrently, in one event loop."""

    async def call(self, asked: Asked, *stored: Any) -> Any:
        """Call the worker, and wait if it is a coroutine."""
        method_name, wants_result, args, kwargs = _unpacked(asked, stored)
        with _told():
            result = getattr(self._there(), method_name)(*args, **kwargs)
            result = await result if inspect.isawaitable(result) else result
            return _wanted(result, wants_result)

    async def stream(self, asked: Asked, *stored: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        """Call a method of the worker that yields, a coroutine or not."""
        method_name, _, args, kwargs = _unpacked(asked, stored)
        with _told():
            results = getattr(self._there(), method_name)(*args, **kwargs)
            if hasattr(results, "__aiter__"):
                async for each in results:
                    yield _packed(each)
            else:
                for each in results:
                    yield _packed(each)


@contextmanager
def _told() -> Iterator[None]:
    """What is raised inside is raised as the driver can have it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, it goes to the driver
        raise portable(error) from None


def portable(error: Exception) -> Exception:
    """`error` as an exception that the driver can unpickle without importing the worker's modules.

    Its class is the most special one that Python or rlframework has. It carries the traceback, and as `FAILURE` what
    was raised in truth.
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
            except TypeError:  # its constructor wants more, as that of UnicodeDecodeError
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
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301 - our own, a line before
    except Exception:  # noqa: BLE001 - whatever it is, this error cannot be sent
        return False


def _wanted(result: Any, wants_result: bool | str) -> Any:
    if wants_result == BARE:
        return result
    return _packed(result) if wants_result else None


def _packed(result: Any) -> Any:
    return transport.Packed(result) if transport.is_worth_packing(result) else result


def _unpacked(asked: Asked, stored: Sequence[Any]) -> tuple[str, bool | str, list[Any], dict[str, Any]]:
    method_name, wants_result, names, values, places = asked
    for place, value in zip(places, stored, strict=True):
        values[place] = value
    return method_name, wants_result, *_arguments(names, values)


def _arguments(names: Sequence[str | None], values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    named = list(zip(names, values, strict=True))
    return [value for name, value in named if name is None], {name: value for name, value in named if name is not None}
