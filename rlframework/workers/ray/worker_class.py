"""Inspection of a worker's class, in a process that may import it, and the description sent to the driver.

Does not import Ray. `find_class` imports the worker's module.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from rlframework.errors import ConfigError, PluginError


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
    options = dict(getattr(found, "_default_options", {})) if metadata is not None else {}
    plain = found if metadata is None else metadata.modified_class.__ray_actor_class__
    if not inspect.isclass(plain):
        raise WorkerClassError(f"{path!r} is a {type(found).__name__}: name a class, with or without ray.remote")
    return plain, {key: value for key, value in options.items() if value is not None}


def describe(plain: type, options: Mapping[str, Any]) -> Description:
    """Describe a class as `find_class` returns it."""
    members = {
        name: member for name, member in inspect.getmembers(plain, inspect.isroutine) if not name.startswith("__")
    }
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


def _method(member: Any) -> Method:
    yields = inspect.isgeneratorfunction(member) or inspect.isasyncgenfunction(member)
    known = {"num_returns": "__ray_num_returns__", "concurrency_group": "__ray_concurrency_group__"}
    options = {option: getattr(member, name) for option, name in known.items() if hasattr(member, name)}
    return Method(yields, options)
