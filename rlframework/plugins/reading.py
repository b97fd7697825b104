"""Reads the records of one plugin, and detects mistakes that pluggy silently accepts.

pluggy accepts a hook of any name, a function without its marker, and any return value. Each of these is an error in
this module, so that a plugin never silently does nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

import pluggy
from pydantic import BaseModel

from rlframework.config.base import Section
from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import (
    AlgorithmConfig,
    EnvironmentConfig,
    GenerationConfig,
    WorkerGroupConfig,
)
from rlframework.errors import PluginError
from rlframework.plugins import hookspec as specs
from rlframework.plugins.types import API_VERSION, RECORD_TYPES, Capability, Record

HOOK_OF_KIND = {record_type.kind: f"{specs.PROJECT}_{record_type.kind}s" for record_type in RECORD_TYPES}
"""Kind of record to the hook that returns such records."""

SECTION_OF_KIND: dict[str, type[BaseModel]] = {
    "policy_worker": Section,
    "worker_group": WorkerGroupConfig,
    "generation_engine": GenerationConfig,
    "environment": EnvironmentConfig,
    "algorithm": AlgorithmConfig,
}
"""Kind of record to the base class of its `config_model`."""


def new_pluggy() -> pluggy.PluginManager:
    """Return a pluggy manager with the hookspecs and without plugins."""
    manager = pluggy.PluginManager(specs.PROJECT)
    manager.add_hookspecs(specs)
    return manager


def read_plugin(plugin: object) -> tuple[list[Record], BaseException | None]:
    """Return the records of `plugin`, and the error that it raised or that a check found (None if there is none)."""
    records: list[Record] = []
    try:
        scratch = new_pluggy()
        scratch.register(plugin)
        _check_hooks(scratch, plugin)
        for kind, hook in HOOK_OF_KIND.items():
            for returned in getattr(scratch.hook, hook)():
                records += _records(kind, hook, returned)
        for record in records:
            _check_record(record)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # kept as the reason
        return records, error
    return records, None


def _check_hooks(scratch: pluggy.PluginManager, plugin: object) -> None:
    known = [name for name in vars(specs) if name.startswith(f"{specs.PROJECT}_")]
    callers = scratch.get_hookcallers(plugin) or []
    for caller in callers:
        for implementation in caller.get_hookimpls():
            if not caller.has_spec() and not implementation.optionalhook:
                raise PluginError(f"unknown hook {caller.name!r}.{_nearest(caller.name, known)}")
            if implementation.kwargnames:
                raise PluginError(
                    f"the hook {caller.name} has default values for {', '.join(implementation.kwargnames)}; "
                    "remove the defaults or the arguments"
                )
    marked = {caller.name for caller in callers}
    for name in known:
        if name not in marked and callable(getattr(plugin, name, None)):
            raise PluginError(
                f"{name} is not marked as a hook; decorate it with @hookimpl from rlframework.plugins.hookspec"
            )
    if not callers:
        raise PluginError("it implements no hook of rlframework; rlframework.plugins.hookspec lists them")


def _records(kind: str, hook: str, returned: object) -> list[Record]:
    expected = next(record_type for record_type in RECORD_TYPES if record_type.kind == kind)
    if isinstance(returned, str) or not isinstance(returned, Iterable):
        raise PluginError(f"{hook} returned {type(returned).__name__}; it must return a list of {expected.__name__}")
    records = list(returned)
    for record in records:
        if not isinstance(record, expected):
            raise PluginError(
                f"{hook} returned a list that contains a {type(record).__name__}; all items must be {expected.__name__}"
            )
    return records


def _check_record(record: Record) -> None:
    if record.api_version != API_VERSION:
        raise PluginError(
            f"its {record.kind} {record.name!r} is written for version {record.api_version} of the plugin API, but "
            f"this rlframework-core has version {API_VERSION}; install compatible versions of the two"
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", record.name):
        raise PluginError(
            f"the {record.kind} name {record.name!r} is invalid: use letters, digits, '-' and '_', starting with a "
            "letter or digit"
        )
    if record.kind == "policy_worker" and record.name in PolicyConfig.model_fields:
        raise PluginError(
            f"the policy_worker name {record.name!r} is a key of the section `policy`; choose another name"
        )
    if not re.fullmatch(r"[\w.]+:[\w.]+", record.target):
        raise PluginError(f"the target {record.target!r} of {record.name!r} must have the form 'package.module:Class'")
    check_model(record)
    strange = [str(item) for item in record.capabilities if not isinstance(item, Capability)]
    if strange:
        allowed = ", ".join(Capability)
        raise PluginError(f"{record.name!r} declares unknown capabilities {', '.join(strange)}; known: {allowed}")


def check_model(record: Record) -> None:
    """Raise `PluginError` if the record's `config_model` does not derive from the base of its kind."""
    model, base = record.config_model, SECTION_OF_KIND.get(record.kind, BaseModel)
    if model is not None and not (isinstance(model, type) and issubclass(model, base)):
        raise PluginError(
            f"config_model of the {record.kind} {record.name!r} must be a class derived from "
            f"{base.__module__}.{base.__name__}, not {model!r}"
        )


def _nearest(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""
