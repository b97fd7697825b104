"""Finds plugins, imports them, and reads and checks the records of their hooks. Errors are kept with each plugin.

The manager selects among them.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from operator import attrgetter
from typing import Any

import rlframework
from rlframework.errors import PluginError
from rlframework.plugins.hookspec import PROJECT
from rlframework.plugins.reading import read_plugin
from rlframework.plugins.types import Record

CORE = "rlframework-core"
UNVERSIONED = "unversioned"


@dataclass(frozen=True)
class Source:
    """The origin of a plugin, known before it is imported. `name` is that of its entry point or module."""

    name: str
    distribution: str
    version: str
    module: str
    load: Callable[[], object]

    def __str__(self) -> str:
        """Return `distribution version`, for error messages."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class LoadedPlugin:
    """A plugin after the attempt to import and read it.

    `error` is None unless the plugin is broken. A `disabled` plugin is not even imported. `records` are those that
    could be read, even if the plugin is broken.
    """

    source: Source
    plugin: object | None = None
    records: tuple[Record, ...] = ()
    error: BaseException | None = None
    disabled: bool = False


def find_sources(modules: Sequence[str]) -> list[Source]:
    """Return the built-in plugins, entry points by name, and modules without an entry point, under unique names."""
    sources = [_core_source(), *_entry_point_sources()]
    known = {source.module for source in sources}
    sources += [_module_source(name) for name in dict.fromkeys(modules) if name not in known]
    return list(_with_unique_names(sources))


def load_source(source: Source, *, disabled: bool) -> LoadedPlugin:
    """Import the plugin and read its records. Its errors are stored, never raised."""
    if disabled:
        return LoadedPlugin(source, disabled=True)
    try:
        plugin = source.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # stored: a plugin that exits Python is just broken
        return LoadedPlugin(source, error=error)
    if source.version == UNVERSIONED:
        source = replace(source, version=_package_version(source.module))
    records, fault = read_plugin(plugin)
    return LoadedPlugin(source, plugin, tuple(records), fault)


def load_target(target: str) -> Any:
    """Import and return the object at the path `module:Name` or `module:Name.attribute`.

    Raises `PluginError` if the path is malformed or the module has no such name. Errors of the import propagate.
    """
    module, _, name = target.partition(":")
    if not module or not name:
        raise PluginError(f"{target!r} is not an import path: write module:Name")
    imported = importlib.import_module(module)
    try:
        return attrgetter(name)(imported)
    except AttributeError as error:
        raise PluginError(f"module {module!r} has no {name!r}; check the target of the plugin's record") from error


def make_current_directory_importable() -> None:
    """Append the current directory to `sys.path`, at the end, so that it does not hide installed packages.

    It is not removed, because a plugin that is not installed may import further modules while it runs.
    """
    here = os.getcwd()
    if not any(os.path.abspath(entry) == here for entry in sys.path):
        sys.path.append(here)


def _core_source() -> Source:
    try:
        version = metadata.version(CORE)
    except metadata.PackageNotFoundError:  # running from a source tree that is not installed
        version = rlframework.__version__
    module = "rlframework.plugins.builtin"
    return Source("core", CORE, version, module, lambda: importlib.import_module(module))


def _entry_point_sources() -> list[Source]:
    sources = []
    for entry in metadata.entry_points(group=PROJECT):
        name, version = (entry.dist.name, entry.dist.version) if entry.dist else ("unknown distribution", UNVERSIONED)
        sources.append(Source(entry.name, name, version, entry.value, entry.load))
    return sorted(sources, key=lambda source: (source.name, source.distribution))


def _module_source(module: str) -> Source:
    return Source(module, f"module {module}", UNVERSIONED, module, lambda: importlib.import_module(module))


def _with_unique_names(sources: Sequence[Source]) -> Iterator[Source]:
    taken: set[str] = set()
    for source in sources:
        unique = source if source.name not in taken else replace(source, name=f"{source.name} ({source.distribution})")
        taken.add(unique.name)
        yield unique


def _package_version(module: str) -> str:
    package = sys.modules.get(module.partition(".")[0])
    return str(getattr(package, "__version__", UNVERSIONED))
