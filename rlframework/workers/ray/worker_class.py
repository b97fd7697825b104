"""The class of a worker, looked at in the process that may import it: where it is, and what the driver must know of it.

Light, and Ray is not imported here: the module of the worker is, by `find_class`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from rlframework.errors import ConfigError


class WorkerClassError(ConfigError, ValueError):
    """What was named as a worker's class is none."""


@dataclass(frozen=True)
class Method:
    """How a method of the worker is called: whether it yields, and the options that `ray.method` gave it."""

    yields: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Configuration:
    """What `configure_worker` wants for one worker."""

    resources: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """What the driver must know of a worker's class, which it does not import.

    `options` are those of its `ray.remote`. `configures`: it has a `configure_worker`.
    """

    name: str
    methods: Mapping[str, Method]
    options: Mapping[str, Any]
    is_async: bool
    configures: bool


def split_path(path: str) -> tuple[str, str]:
    """Module and class of `module:Class` or `module.Class`; a `WorkerClassError` for anything else."""
    module, separator, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not separator or not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
        raise WorkerClassError(
            f"{path!r} is not the import path of a worker's class: write module:Class or module.Class"
        )
    return module, name


def find_class(path: str) -> tuple[type, dict[str, Any]]:
    """The plain class that `path` names, and the options of its `ray.remote`. Its module is imported here."""
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


def describe(path: str) -> Description:
    """What the driver must know of the class."""
    plain, options = find_class(path)
    members = {
        name: member for name, member in inspect.getmembers(plain, inspect.isroutine) if not name.startswith("__")
    }
    is_async = any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in members.values())
    methods = {name: _method(member) for name, member in members.items()}
    return Description(plain.__name__, methods, options, is_async, hasattr(plain, "configure_worker"))


def configuration(
    path: str, num_gpus: float, bundle_indices: tuple[int, list[int]] | None, num_gpus_per_node: int
) -> Configuration:
    """The answer of the class's `configure_worker`; nothing where it has none."""
    plain, _ = find_class(path)
    configure = getattr(plain, "configure_worker", None)
    if configure is None:
        return Configuration()
    known: dict[str, Any] = {"num_gpus": num_gpus, "bundle_indices": bundle_indices}
    if "num_gpus_per_node" in inspect.signature(configure).parameters:
        known["num_gpus_per_node"] = num_gpus_per_node
    answer = tuple(configure(**known))
    if len(answer) not in (3, 4):
        raise WorkerClassError(
            f"{path!r}: configure_worker must return (resources, env_vars, init_kwargs) and, if it likes, "
            f"runtime_env; it returned {len(answer)} values"
        )
    return Configuration(*(part or {} for part in answer))


def _method(member: Any) -> Method:
    yields = inspect.isgeneratorfunction(member) or inspect.isasyncgenfunction(member)
    known = {"num_returns": "__ray_num_returns__", "concurrency_group": "__ray_concurrency_group__"}
    options = {option: getattr(member, name) for option, name in known.items() if hasattr(member, name)}
    return Method(yields, options)
