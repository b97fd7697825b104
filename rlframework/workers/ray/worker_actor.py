"""`WorkerActor`: the Ray actor that hosts a worker in its process.

The worker need not know rlframework: its rank may be given in environment variables, set before its module is imported,
and its exceptions are raised in the driver as Ray raises them. Ray itself is not imported: the class becomes an actor
where it is started.
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
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers import machine
from rlframework.workers.failures import HostFailure
from rlframework.workers.ray import transport
from rlframework.workers.ray.worker_class import Configuration, Description, configuration, describe, find_class
from rlframework.workers.worker_host import WorkerHost, find_target

BARE = "bare"
"""Value of `wants_result` for a call with several returns: the result is not packed, so that Ray can split it."""
FAILURE = "rlframework_failure"
"""Attribute of a raised exception with the `HostFailure` that describes the original one in the worker."""

PackedCall = tuple[str, bool | str, Sequence[str | None], list[Any], Sequence[int]]
"""A call: method name, `wants_result`, argument names (None: positional), argument values, and the positions of the
values that are passed separately because they are in Ray's store. See `transport.call_arguments`."""


class WorkerActor(WorkerHost):
    """Hosts one worker. Cheap to construct; `load` imports its class, `construct` constructs it.

    With a `path`, the constructor does both, so that no call can precede them; the other arguments are those of
    `construct`. A call raises the worker's exceptions as classes that every process knows, see `portable`.
    """

    def __init__(self, path: str = "", *construct: Any) -> None:
        super().__init__()
        self._class: type | None = None
        self._error: Exception | None = None
        if path:
            try:
                self.load(WorkerSpec(path, {}), {})
                self.construct(*construct)
            except Exception as error:  # noqa: BLE001 - raised by every call
                self._error = error

    def __repr__(self) -> str:
        return repr(self._worker) if self._worker is not None else f"WorkerActor({self._class})"

    def load(self, spec: WorkerSpec, environment: Mapping[str, str], listen_at: str = "") -> Description:
        """Set the environment variables, compare plugins, then import and describe the class.

        `listen_at` is the address at which other machines reach this one.
        """
        os.environ.update(environment)
        machine.listen_for_gloo_at(listen_at)
        with _raises_portable():
            self._class, options = find_class(find_target(spec))
            return describe(self._class, options)

    def configure(
        self, workers: Sequence[tuple[float, tuple[int, list[int]] | None]], num_gpus_per_node: int
    ) -> list[Configuration]:
        """Call `configure_worker` for each worker, given as its fraction of a GPU and its bundles."""
        with _raises_portable():
            return [configuration(self._loaded(), *each, num_gpus_per_node) for each in workers]

    def construct(self, extra: Mapping[str, Any], asked: PackedCall, *stored: Any) -> None:
        """Construct the worker; keywords in `extra` take precedence. If this raises, every later call does too."""
        _, _, args, kwargs = _unpacked(asked, stored)
        try:
            with _raises_portable():
                self._worker = self._loaded()(*args, **(kwargs | dict(extra)))
        except Exception as error:
            self._error = error
            raise

    def call(self, asked: PackedCall, *stored: Any) -> Any:  # type: ignore[override]
        """Call the worker; return its packed result, None if it is not wanted, or with `BARE` the result itself."""
        method_name, wants_result, args, kwargs = _unpacked(asked, stored)
        with _raises_portable():
            return _wanted(self._method(method_name)(*args, **kwargs), wants_result)

    def stream(self, asked: PackedCall, *stored: Any) -> Iterator[Any]:
        """Call a generator method of the worker."""
        method_name, _, args, kwargs = _unpacked(asked, stored)
        with _raises_portable():
            for each in self._method(method_name)(*args, **kwargs):
                yield transport.Packed(each)

    def _loaded(self) -> type:
        if self._class is None:
            raise WorkerError("construct was called before load")
        return self._class

    def _method(self, name: str) -> Any:
        if self._error is not None:
            raise self._error
        return getattr(self._worker, name)


class AsyncWorkerActor(WorkerActor):
    """A `WorkerActor` for a class with coroutines: its calls run concurrently in one event loop."""

    async def call(self, asked: PackedCall, *stored: Any) -> Any:  # type: ignore[override]
        """Call the worker; await the result of a coroutine."""
        method_name, wants_result, args, kwargs = _unpacked(asked, stored)
        with _raises_portable():
            result = self._method(method_name)(*args, **kwargs)
            return _wanted(await result if inspect.isawaitable(result) else result, wants_result)

    async def stream(self, asked: PackedCall, *stored: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        """Call a generator or asynchronous generator method of the worker."""
        method_name, _, args, kwargs = _unpacked(asked, stored)
        with _raises_portable():
            results = self._method(method_name)(*args, **kwargs)
            if hasattr(results, "__aiter__"):
                async for each in results:
                    yield transport.Packed(each)
            else:
                for each in results:
                    yield transport.Packed(each)


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
    return transport.Packed(result) if wants_result else None


def _unpacked(asked: PackedCall, stored: Sequence[Any]) -> tuple[str, bool | str, list[Any], dict[str, Any]]:
    method_name, wants_result, names, values, positions = asked
    for position, value in zip(positions, stored, strict=True):
        values[position] = value
    named = list(zip(names, values, strict=True))
    args = [value for name, value in named if name is None]
    return method_name, wants_result, args, {name: value for name, value in named if name is not None}
