"""`WorkerActor`: the Ray actor that hosts a worker, and how it inspects the worker's class for the driver.

The worker need not know rlframework: its rank may be given in environment variables, set before its module is imported,
and its exceptions are raised in the driver as Ray raises them.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from rlframework.errors import ConfigError, PluginError, WorkerError
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers import machine
from rlframework.workers.failures import portable
from rlframework.workers.ray.transport import Packed
from rlframework.workers.worker_host import WorkerHost, find_target

BARE = "bare"
"""Value of `wants_result` for a call with several returns: the result is not packed, so that Ray can split it."""

PackedCall = tuple[str, bool | str, Sequence[str | None], list[Any], Sequence[int]]
"""A call: method name, `wants_result`, argument names (None: positional), argument values, and the positions of the
values that are passed separately because they are in Ray's store. See `worker_builder.call_arguments`."""


class WorkerClassError(PluginError, ConfigError, ValueError):
    """The import path of a worker's class is invalid, or does not name a usable class."""


@dataclass(frozen=True)
class Method:
    """How to call a method of the worker: whether it yields, and its options from `ray.method`."""

    yields: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Configuration:
    """The return values of `configure_worker` for one worker."""

    resources: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """Describes a worker's class to the driver, which does not import it.

    `options` are those of its `ray.remote`; `configures` says whether it has a `configure_worker`, and `forwards`
    whether it has a `__getattr__`, and therefore methods that are not among `methods`.
    """

    name: str
    methods: Mapping[str, Method] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    is_async: bool = False
    configures: bool = False
    forwards: bool = False


class WorkerActor(WorkerHost):
    """Hosts one worker. Cheap to construct; `load` imports its class, `construct` constructs it.

    A call raises the worker's exceptions as classes that every process knows, see `failures.portable`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._class: type | None = None
        self._error: Exception | None = None

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
        with _raises_portable():
            result, wants_result = self._called(asked, stored)
            return _wanted(result, wants_result)

    def stream(self, asked: PackedCall, *stored: Any) -> Iterator[Any]:
        """Call a generator method of the worker."""
        with _raises_portable():
            for each in self._called(asked, stored)[0]:
                yield Packed(each)

    def _loaded(self) -> type:
        if self._class is None:
            raise WorkerError("construct was called before load")
        return self._class

    def _called(self, asked: PackedCall, stored: Sequence[Any]) -> tuple[Any, bool | str]:
        if self._error is not None:
            raise self._error
        method_name, wants_result, args, kwargs = _unpacked(asked, stored)
        return getattr(self._worker, method_name)(*args, **kwargs), wants_result


class AsyncWorkerActor(WorkerActor):
    """A `WorkerActor` for a class with coroutines: its calls run concurrently in one event loop."""

    async def call(self, asked: PackedCall, *stored: Any) -> Any:  # type: ignore[override]
        """Call the worker; await the result of a coroutine."""
        with _raises_portable():
            result, wants_result = self._called(asked, stored)
            return _wanted(await result if inspect.isawaitable(result) else result, wants_result)

    async def stream(self, asked: PackedCall, *stored: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        """Call a generator or asynchronous generator method of the worker."""
        with _raises_portable():
            results = self._called(asked, stored)[0]
            if hasattr(results, "__aiter__"):
                async for each in results:
                    yield Packed(each)
            else:
                for each in results:
                    yield Packed(each)


@contextmanager
def _raises_portable() -> Iterator[None]:
    """Convert exceptions raised in the body with `portable`."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - every exception is sent to the driver
        raise portable(error) from None


def _wanted(result: Any, wants_result: bool | str) -> Any:
    if wants_result == BARE:
        return result
    return Packed(result) if wants_result else None


def _unpacked(asked: PackedCall, stored: Sequence[Any]) -> tuple[str, bool | str, list[Any], dict[str, Any]]:
    method_name, wants_result, names, values, positions = asked
    for position, value in zip(positions, stored, strict=True):
        values[position] = value
    named = list(zip(names, values, strict=True))
    args = [value for name, value in named if name is None]
    return method_name, wants_result, args, {name: value for name, value in named if name is not None}


# -- the worker's class, in a process that may import it --------------------------------------------------------------


def split_path(path: str) -> tuple[str, str]:
    """Split `module:Class` or `module.Class` into module and class; raise `WorkerClassError` for anything else."""
    module, separator, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not separator or not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
        raise WorkerClassError(f"{path!r} is not the import path of a worker class: write module:Class or module.Class")
    return module, name


def find_class(path: str) -> tuple[type, dict[str, Any]]:
    """Import the class at `path`; return it undecorated, and the options of its `ray.remote`."""
    module, name = split_path(path)
    imported = importlib.import_module(module)
    try:
        found = attrgetter(name)(imported)
    except AttributeError as error:
        raise WorkerClassError(f"{path!r}: module {module!r} has no {name!r}") from error
    metadata = getattr(found, "__ray_metadata__", None)
    options = {} if metadata is None else found._default_options
    plain = found if metadata is None else metadata.modified_class.__ray_actor_class__
    if not inspect.isclass(plain):
        raise WorkerClassError(f"{path!r} is a {type(found).__name__}: name a class, with or without ray.remote")
    return plain, {key: value for key, value in options.items() if value is not None}


def describe(plain: type, options: Mapping[str, Any]) -> Description:
    """Describe a class as `find_class` returns it."""
    members = dict(inspect.getmembers(plain, inspect.isroutine))
    members = {name: member for name, member in members.items() if not name.startswith("__")}
    return Description(
        plain.__name__,
        {name: _method(member) for name, member in members.items()},
        options,
        is_async=any(
            inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in members.values()
        ),
        configures=hasattr(plain, "configure_worker"),
        forwards=hasattr(plain, "__getattr__"),
    )


def _method(member: Any) -> Method:
    yields = inspect.isgeneratorfunction(member) or inspect.isasyncgenfunction(member)
    known = {"num_returns": "__ray_num_returns__", "concurrency_group": "__ray_concurrency_group__"}
    options = {option: getattr(member, name) for option, name in known.items() if hasattr(member, name)}
    return Method(yields, options)


def configuration(
    plain: type, num_gpus: float, bundle_indices: tuple[int, list[int]] | None, num_gpus_per_node: int
) -> Configuration:
    """Call the class's `configure_worker`; an empty configuration if it has none."""
    configure = getattr(plain, "configure_worker", None)
    if configure is None:
        return Configuration()
    known: dict[str, Any] = {"num_gpus": num_gpus, "bundle_indices": bundle_indices}
    if "num_gpus_per_node" in inspect.signature(configure).parameters:
        known["num_gpus_per_node"] = num_gpus_per_node
    answer = tuple(configure(**known))
    if len(answer) not in (3, 4):
        raise WorkerClassError(
            f"{plain.__name__}: configure_worker must return (resources, env_vars, init_kwargs) and optionally "
            f"runtime_env; it returned {len(answer)} values"
        )
    return Configuration(*(part or {} for part in answer))
