"""`WorkerActor`: the Ray actor that hosts a worker, and how it inspects the worker's class for the driver.

The worker need not know rlframework: its rank may be given in environment variables, set before its module is imported,
and its exceptions are raised in the driver as Ray raises them.
"""

from __future__ import annotations

import importlib
import inspect
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from rlframework.base.errors import ConfigError, PluginError
from rlframework.interfaces.worker_group import WorkerContext, WorkerSpec
from rlframework.workers import machine
from rlframework.workers.failures import portable
from rlframework.workers.remote_group import WorkerHost, find_target
from rlframework_ray.transport import Packed

BARE = "bare"
"""Value of `wants_result` for a call with several returns: the result is not packed, so that Ray can split it."""
NOTICES = "notices"
"""The concurrency group of `WorkerActor.notify`, which therefore runs beside a call."""


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

    `options` are those of its `ray.remote`; `configured` has an entry for each worker if it has a `configure_worker`;
    `forwards` says whether it has a `__getattr__`, and therefore methods that are not among `methods`.
    """

    name: str
    methods: Mapping[str, Method] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    is_async: bool = False
    configured: Sequence[Configuration] = ()
    forwards: bool = False


class WorkerActor(WorkerHost):
    """Hosts one worker. Cheap to construct; `load` imports its class, `construct` constructs it.

    A call raises the worker's exceptions as classes that every process knows, see `failures.portable`.
    """

    def __init__(self) -> None:
        self._notices = threading.Event()
        super().__init__(self._take_notice)
        self._class: Any = None

    def __repr__(self) -> str:
        return repr(self._worker) if self._worker is not None else f"WorkerActor({self._class})"

    def load(
        self,
        spec: WorkerSpec,
        environment: Mapping[str, str],
        listen_at: str = "",
        workers: Sequence[Mapping[str, Any]] = (),
    ) -> Description:
        """Set the environment variables, compare plugins, then import and describe the class, see `describe`.

        `listen_at` is the address at which other machines reach this one.
        """
        os.environ.update(environment)
        machine.listen_for_gloo_at(listen_at)
        with _raises_portable():
            self._class, options = find_class(find_target(spec))
            return describe(self._class, options, workers)

    def construct(self, *args: Any, **kwargs: Any) -> None:
        """Construct the worker."""
        if isinstance(context := kwargs.get("context"), WorkerContext):
            kwargs["context"] = replace(context, notified=self._notified)
        with _raises_portable():
            self._worker = self._class(*args, **kwargs)

    def notify(self) -> None:
        """Make `WorkerContext.notified` return True once. Called in the concurrency group `NOTICES`."""
        self._notices.set()

    def _take_notice(self) -> bool:
        noticed = self._notices.is_set()
        self._notices.clear()
        return noticed

    def call(self, method_name: str, wants_result: bool | str, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Call the worker; return its packed result, None if it is not wanted, or with `BARE` the result itself."""
        with _raises_portable():
            return _reply(getattr(self._worker, method_name)(*args, **kwargs), wants_result)

    def stream(self, method_name: str, wants_result: bool | str, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Call a generator method of the worker."""
        with _raises_portable():
            for each in getattr(self._worker, method_name)(*args, **kwargs):
                yield Packed(each)


class AsyncWorkerActor(WorkerActor):
    """A `WorkerActor` for a class with coroutines: its calls run concurrently in one event loop."""

    async def call(self, method_name: str, wants_result: bool | str, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Call the worker; await the result of a coroutine."""
        with _raises_portable():
            result = getattr(self._worker, method_name)(*args, **kwargs)
            return _reply(await result if inspect.isawaitable(result) else result, wants_result)

    async def stream(  # type: ignore[override]
        self, method_name: str, wants_result: bool | str, /, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Call a generator or asynchronous generator method of the worker."""
        with _raises_portable():
            results = getattr(self._worker, method_name)(*args, **kwargs)
            if not hasattr(results, "__aiter__"):
                for each in results:
                    yield Packed(each)
                return
            async for each in results:
                yield Packed(each)


@contextmanager
def _raises_portable() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - every exception is sent to the driver
        raise portable(error) from None


def _reply(result: Any, wants_result: bool | str) -> Any:
    return result if wants_result == BARE else Packed(result) if wants_result else None


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


def describe(plain: type, options: Mapping[str, Any], workers: Sequence[Mapping[str, Any]] = ()) -> Description:
    """Describe a class as `find_class` returns it. Its `configure_worker` gets the arguments in `workers`, for each."""
    found = inspect.getmembers(plain, inspect.isroutine)
    members = {name: member for name, member in found if not name.startswith("__")}
    asynchronous = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return Description(
        plain.__name__,
        {name: _method(member) for name, member in members.items()},
        options,
        is_async=any(test(member) for member in members.values() for test in asynchronous),
        configured=[_configuration(plain, each) for each in workers if hasattr(plain, "configure_worker")],
        forwards=hasattr(plain, "__getattr__"),
    )


def _method(member: Any) -> Method:
    yields = inspect.isgeneratorfunction(member) or inspect.isasyncgenfunction(member)
    known = {"num_returns": "__ray_num_returns__", "concurrency_group": "__ray_concurrency_group__"}
    options = {option: getattr(member, name) for option, name in known.items() if hasattr(member, name)}
    return Method(yields, options)


def _configuration(plain: Any, arguments: Mapping[str, Any]) -> Configuration:
    accepted = inspect.signature(plain.configure_worker).parameters
    known = {name: value for name, value in arguments.items() if name in accepted or name != "num_gpus_per_node"}
    answer = tuple(plain.configure_worker(**known))
    if len(answer) not in (3, 4):
        raise WorkerClassError(
            f"{plain.__name__}: configure_worker must return (resources, env_vars, init_kwargs) and optionally "
            f"runtime_env; it returned {len(answer)} values"
        )
    return Configuration(*(part or {} for part in answer))
