"""The plugin manager: discovers the plugins of this process and selects records by kind and name.

Create one with `create_manager`; managers share no state. A plugin that cannot be imported or read is kept as broken:
selecting it raises a `PluginError` from the original error, and other plugins are unaffected.
"""

from __future__ import annotations

import importlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pluggy

from rlframework.errors import PluginError
from rlframework.plugins import messages
from rlframework.plugins.listing import PluginListing
from rlframework.plugins.loading import (
    UNVERSIONED,
    LoadedPlugin,
    find_sources,
    load_source,
    make_current_directory_importable,
)
from rlframework.plugins.reading import HOOK_OF_KIND, new_pluggy
from rlframework.plugins.types import EnvironmentRecord, Record
from rlframework.plugins.user_defined import environment_record


@dataclass(frozen=True)
class Registered:
    """A record with the plugin and the distribution that provide it."""

    record: Record
    distribution: str
    version: str
    plugin: str

    @property
    def blame(self) -> str:
        """`distribution version`, for error messages."""
        return f"{self.distribution} {self.version}"


def create_manager(modules: Sequence[str] = (), disabled: Sequence[str] | None = None) -> PluginManager:
    """Create a manager of the built-in plugins, all installed plugins, and those in `modules`.

    `modules` are import names of plugins that need not be installed (`plugins:` in the configuration); for these, the
    current directory is importable. `disabled` are names of plugins, distributions or records to disable; None reads
    them from RLFRAMEWORK_DISABLE_PLUGINS, separated by commas. Raises `PluginError` if one of the names is unknown.
    """
    if disabled is None:
        disabled = os.environ.get(messages.DISABLE_VARIABLE, "").split(",")
    words = frozenset(word.strip() for word in disabled) - {""}
    if modules:
        make_current_directory_importable()
    sources = find_sources(modules)
    loaded = [load_source(source, disabled=bool(words & {source.name, source.distribution})) for source in sources]
    return PluginManager(loaded, words)


class PluginManager:
    """The plugins of this process: active, broken and disabled. Use `create_manager` to create one."""

    def __init__(self, plugins: Sequence[LoadedPlugin], disabled: frozenset[str]) -> None:
        """Manage the loaded `plugins`, without the records named in `disabled`."""
        self._plugins = list(plugins)
        self._disabled = disabled
        self._pluggy = new_pluggy()
        known = set[str]()
        for plugin in self._plugins:
            known |= {plugin.source.name, plugin.source.distribution, *(record.name for record in plugin.records)}
            if plugin.error is None and not plugin.disabled:
                self._pluggy.register(plugin.plugin, plugin.source.name)
        for word in sorted(disabled - known):
            raise PluginError(messages.unknown_disabled_word(word, known))

    @property
    def hook(self) -> pluggy.HookRelay:
        """The hooks of all active plugins, for calling observer hooks."""
        return self._pluggy.hook

    def registered(self, kind: str) -> dict[str, Registered]:
        """Return the selectable records by name: not broken, not disabled and not duplicated."""
        _check_kind(kind)
        return {name: found[0] for (of, name), found in self._by_name().items() if of == kind and len(found) == 1}

    def select(self, kind: str, name: str) -> Registered:
        """Return the record of `kind` named `name`; for an environment, `name` may be an import path `module:Class`.

        Raises `PluginError` if it is unknown, broken (from the original error), disabled or duplicated.
        """
        _check_kind(kind)
        if kind == EnvironmentRecord.kind and ":" in name:
            return _own_environment(name)
        found = self._by_name().get((kind, name), [])
        if len(found) > 1:
            raise PluginError(messages.duplicate(kind, name, [entry.blame for entry in found]))
        broken = self._broken(kind, name)
        if broken is not None and broken.error is not None:
            subject = f"{messages.KEY_OF_KIND[kind]}: the plugin {broken.source.name!r}"
            raise PluginError(messages.broken(subject, str(broken.source), broken.error)) from broken.error
        if found:
            return found[0]
        raise PluginError(self._why_not(kind, name))

    def load(self, record: Record) -> type:
        """Import the class named by `record.target`. Raises `PluginError` from any error of the import."""
        module, _, attribute = record.target.partition(":")
        try:
            target = importlib.import_module(module)
            for part in attribute.split("."):
                target = getattr(target, part)
        except (Exception, SystemExit) as error:  # reported with the plugin's name
            subject = f"the {record.kind} {record.name!r}"
            text = messages.broken(subject, self._blame(record), error)
            raise PluginError(f"{text} (while importing {record.target})") from error
        if not isinstance(target, type):
            raise PluginError(f"{record.target}, of {self._blame(record)}, is not a class: {target!r}")
        return target

    def listing(self) -> list[PluginListing]:
        """Return one row per record, and one per plugin without records, with its status and the reason."""
        return [row for plugin in self._plugins for row in self._rows(plugin)]

    def fingerprint(self) -> dict[str, tuple[str, str]]:
        """Return the distribution and version of each active plugin, by plugin name."""
        return {
            plugin.source.name: (plugin.source.distribution, plugin.source.version)
            for plugin in self._plugins
            if plugin.error is None and not plugin.disabled
        }

    def compare_fingerprint(self, theirs: Mapping[str, tuple[str, str]]) -> None:
        """Raise a `PluginError` that lists how the driver's fingerprint `theirs` differs from this process's."""
        ours, differences = self.fingerprint(), []
        for name in sorted({*ours, *theirs}):
            here, there = ours.get(name), theirs.get(name)
            if here is None or there is None or tuple(here) != tuple(there):
                differences.append(f"{name}: the driver has {_side(there)}, this process has {self._own_side(name)}")
        if differences:
            raise PluginError(
                f"The driver and a worker have different plugins: {'; '.join(differences)}. Install the same "
                "distributions in both environments."
            )

    def _active(self) -> Iterator[Registered]:
        for plugin in self._plugins:
            if plugin.error is None:
                for record in plugin.records:
                    if record.name not in self._disabled:
                        source = plugin.source
                        yield Registered(record, source.distribution, source.version, source.name)

    def _by_name(self) -> dict[tuple[str, str], list[Registered]]:
        found = defaultdict(list)
        for entry in self._active():
            found[entry.record.kind, entry.record.name].append(entry)
        return found

    def _broken(self, kind: str, name: str) -> LoadedPlugin | None:
        """The broken plugin that `name` refers to, by one of its records or else by the plugin's own name.

        A record of an active plugin takes precedence over a broken plugin of the same name.
        """
        broken = [plugin for plugin in self._plugins if plugin.error is not None]
        for plugin in broken:
            if any((record.kind, record.name) == (kind, name) for record in plugin.records):
                return plugin
        if (kind, name) in self._by_name():
            return None
        return next((plugin for plugin in broken if plugin.source.name == name), None)

    def _why_not(self, kind: str, name: str) -> str:
        for plugin in self._plugins:
            records = {record.name for record in plugin.records if record.kind == kind}
            switched_off = plugin.source.name == name if plugin.disabled else name in records & self._disabled
            if switched_off:
                return messages.disabled(kind, name, str(plugin.source))
        installed = [(entry.record.name, entry.blame) for entry in self.registered(kind).values()]
        unusable = []
        for plugin in self._plugins:
            if plugin.disabled:
                unusable.append(f"{plugin.source.name} of {plugin.source} is disabled.")
            if plugin.error is not None:
                unusable.append(messages.broken(plugin.source.name, str(plugin.source), plugin.error) + ".")
        return messages.unknown(kind, name, installed, unusable)

    def _rows(self, plugin: LoadedPlugin) -> Iterator[PluginListing]:
        source = plugin.source
        status, reason = "active", ""
        if plugin.disabled:
            status, reason = "disabled", messages.DISABLE_VARIABLE
        elif plugin.error is not None:
            status, reason = "broken", messages.reason(plugin.error)
        for record in plugin.records:
            yield PluginListing.of_record(record, source, *self._status(record, status, reason))
        if not plugin.records:
            yield PluginListing(source.name, None, source.distribution, source.version, None, (), status, reason)

    def _status(self, record: Record, status: str, reason: str) -> tuple[str, str]:
        if status == "active" and record.name in self._disabled:
            return "disabled", messages.DISABLE_VARIABLE
        found = self._by_name().get((record.kind, record.name), [])
        if status == "active" and len(found) > 1:
            return "broken", messages.duplicate(record.kind, record.name, [entry.blame for entry in found])
        return status, reason

    def _blame(self, record: Record) -> str:
        for plugin in self._plugins:
            if any(record is own for own in plugin.records):
                return str(plugin.source)
        return "a plugin that this manager does not know"

    def _own_side(self, name: str) -> str:
        for plugin in self._plugins:
            if plugin.source.name == name and plugin.disabled:
                return f"it disabled ({plugin.source})"
            if plugin.source.name == name and plugin.error is not None:
                return f"it broken ({plugin.source}: {messages.reason(plugin.error)})"
        return _side(self.fingerprint().get(name))


def _own_environment(path: str) -> Registered:
    """The record for an import path, as if a plugin had registered it."""
    module = f"module {path.partition(':')[0]}"
    return Registered(environment_record(path), module, UNVERSIONED, module)


def _side(entry: Sequence[str] | None) -> str:
    return " ".join(entry) if entry else "none"


def _check_kind(kind: str) -> None:
    if kind not in HOOK_OF_KIND:
        raise ValueError(f"unknown kind of record {kind!r}; known kinds: {', '.join(HOOK_OF_KIND)}")
