"""Reads the records of one plugin, and finds the mistakes that pluggy lets pass in silence.

pluggy accepts a hook of any name, a function without its marker, and any return value. Here each of these is an error,
so that a plugin that does nothing says why.
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
"""Kind of record to the hook that returns it."""

SECTION_OF_KIND: dict[str, type[BaseModel]] = {
    "policy_worker": Section,
    "worker_group": WorkerGroupConfig,
    "generation_engine": GenerationConfig,
    "environment": EnvironmentConfig,
    "algorithm": AlgorithmConfig,
}
"""Kinds whose section of the configuration has a base that a record's own model must derive from."""


def new_pluggy() -> pluggy.PluginManager:
    """A pluggy manager that knows the hookspecs, and no plugin."""
    manager = pluggy.PluginManager(specs.PROJECT)
    manager.add_hookspecs(specs)
    return manager


def read_plugin(plugin: object) -> tuple[list[Record], BaseException | None]:
    """The records of `plugin`, and what is wrong with it (None: nothing), be it an error that the plugin raised."""
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
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the plugin's own, kept as the reason
        return records, error
    return records, None


def _check_hooks(scratch: pluggy.PluginManager, plugin: object) -> None:
    known = [name for name in vars(specs) if name.startswith(f"{specs.PROJECT}_")]
    callers = scratch.get_hookcallers(plugin) or []
    for caller in callers:
        for implementation in caller.get_hookimpls():
            if not caller.has_spec() and not implementation.optionalhook:
                raise PluginError(f"there is no hook {caller.name!r}.{_nearest(caller.name, known)}")
            if implementation.kwargnames:
                raise PluginError(
                    f"the hook {caller.name} gives default values to {', '.join(implementation.kwargnames)}: "
                    "take them out, or leave the argument out"
                )
    marked = {caller.name for caller in callers}
    for name in known:
        if name not in marked and callable(getattr(plugin, name, None)):
            raise PluginError(f"{name} is not marked: put @hookimpl (of rlframework.plugins.hookspec) above it")
    if not callers:
        raise PluginError("it implements no hook of rlframework: see rlframework.plugins.hookspec for what there is")


def _records(kind: str, hook: str, returned: object) -> list[Record]:
    expected = next(record_type for record_type in RECORD_TYPES if record_type.kind == kind)
    if isinstance(returned, str) or not isinstance(returned, Iterable):
        raise PluginError(f"{hook} returned {type(returned).__name__}; it must return a list of {expected.__name__}")
    records = list(returned)
    for record in records:
        if not isinstance(record, expected):
            raise PluginError(
                f"{hook} returned a list with a {type(record).__name__} in it; all must be {expected.__name__}"
            )
    return records


def _check_record(record: Record) -> None:
    if record.api_version != API_VERSION:
        raise PluginError(
            f"its {record.kind} {record.name!r} is made for version {record.api_version} of the plugin API, and this "
            f"rlframework-core has version {API_VERSION}: install versions of the two that fit"
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", record.name):
        raise PluginError(
            f"the {record.kind} name {record.name!r} cannot be a word of the configuration: "
            "use letters, digits, '-' and '_'"
        )
    if record.kind == "policy_worker" and record.name in PolicyConfig.model_fields:
        raise PluginError(f"the policy_worker name {record.name!r} is already a key of the section `policy`")
    if not re.fullmatch(r"[\w.]+:[\w.]+", record.target):
        raise PluginError(f"the target {record.target!r} of {record.name!r} is not of the form 'package.module:Class'")
    check_model(record)
    strange = [str(item) for item in record.capabilities if not isinstance(item, Capability)]
    if strange:
        allowed = ", ".join(Capability)
        raise PluginError(f"{record.name!r} declares {', '.join(strange)}; the capabilities are {allowed}")


def check_model(record: Record) -> None:
    """A `PluginError` where the record's `config_model` is none of its kind."""
    model, base = record.config_model, SECTION_OF_KIND.get(record.kind, BaseModel)
    if model is not None and not (isinstance(model, type) and issubclass(model, base)):
        raise PluginError(
            f"config_model of the {record.kind} {record.name!r} must be a class derived from "
            f"{base.__module__}.{base.__name__}, and is {model!r}"
        )


def _nearest(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""
