"""The plugin manager: discovers the plugins of this process and selects records by kind and name.

Create one with `create_manager`; managers share no state. A plugin that cannot be imported or read is kept as broken:
selecting it raises a `PluginError` from the original error, and other plugins are unaffected.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pluggy

from rlframework.base.errors import PluginError
from rlframework.plugins.discovery import (
    DISABLE_VARIABLE,
    UNVERSIONED,
    Plugin,
    did_you_mean,
    extra_of,
    extras,
    find_plugins,
    install_command,
    load_target,
    make_current_directory_importable,
    new_pluggy,
    one_line,
)
from rlframework.plugins.hook_calls import Hook, answers
from rlframework.plugins.listing import PluginListing
from rlframework.plugins.types import RECORD_TYPES, PolicyWorkerRecord, Record
from rlframework.plugins.user_defined import BASE_CLASSES, own_record

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_NOUNS = {PolicyWorkerRecord.kind: "backend"}
"""Words for kinds whose name is not the word that users know."""


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
        disabled = os.environ.get(DISABLE_VARIABLE, "").split(",")
    words = frozenset(word.strip() for word in disabled) - {""}
    if modules:
        make_current_directory_importable()
    plugins = find_plugins(modules)
    for plugin in plugins:
        plugin.disabled = bool(words & {plugin.name, plugin.distribution})
        if not plugin.disabled:
            plugin.load()
    return PluginManager(plugins, words)


def load_from_plugin(modules: Sequence[str], hook: str, key: str) -> Any:
    """Return the object at the import path of the first plugin that implements `hook`, for the configuration's `key`.

    `modules`: as for `create_manager`. Raises `PluginError` if no plugin does.
    """
    manager = create_manager(modules)
    loaded = manager.call_first(hook, lambda hook: None if (target := hook()) is None else load_target(target))
    if loaded is None:
        raise PluginError(f"{key} needs a plugin with the hook {hook}: {manager.how_to_get(hook)}")
    return loaded


class PluginManager:
    """The plugins of this process: active, broken and disabled. Use `create_manager` to create one."""

    def __init__(self, plugins: Sequence[Plugin], disabled: frozenset[str]) -> None:
        """Manage the loaded `plugins`, without the records named in `disabled`."""
        self._plugins, self._disabled = plugins, disabled
        self._pluggy = new_pluggy()
        self._warned = set[str]()
        self._found: Mapping[tuple[str, str], list[Registered]] = defaultdict(list)
        known = set[str]()
        for plugin in plugins:
            known |= {plugin.name, plugin.distribution, *(record.name for record in plugin.records)}
            if plugin.status != "active":
                continue
            self._pluggy.register(plugin.loaded, plugin.name)
            for record in plugin.records:
                if record.name not in disabled:
                    entry = Registered(record, plugin.distribution, plugin.version, plugin.name)
                    self._found[record.kind, record.name].append(entry)
        for word in sorted(disabled - known):
            raise PluginError(
                f"{DISABLE_VARIABLE}: there is no plugin {word!r}.{did_you_mean(word, sorted(known))} Plugins that can "
                f"be disabled: {', '.join(sorted(known))}."
            )

    @property
    def hook(self) -> pluggy.HookRelay:
        """The hooks of all active plugins, for observer hooks; the others are called with `call`."""
        return self._pluggy.hook

    def hints(self, hook: str, **arguments: Any) -> str:
        """Return what plugins know of the words of other libraries, see `rlframework.config.hints.Hints`."""
        return str(self.call_first(f"rlframework_{hook}", lambda hook: hook(**arguments) or None) or "")

    def implements(self, hook: str) -> bool:
        """Whether an active plugin implements `hook`."""
        return bool(getattr(self.hook, hook).get_hookimpls())

    def call(
        self, hook: str, use: Callable[[Hook], T | None], warn: Callable[[str], None] | None = None
    ) -> Iterator[tuple[Plugin, T]]:
        """Yield each active plugin that implements `hook`, in pluggy's order, with `use(hook of that plugin)`.

        Results that are None are left out. A plugin whose hook or answer makes `use` raise is named: in an error, or in
        a warning that is logged once (or given to `warn`), see `hook_calls.ON_FAILURE`. A slow one is named in the log.
        """
        return answers(hook, self._implementations(hook), use, warn or self._warn_once)

    def call_first(self, hook: str, use: Callable[[Hook], T | None]) -> T | None:
        """Call `hook` as `call` does until a plugin has an answer, and return that; None if none has."""
        return next((answer for _, answer in self.call(hook, use)), None)

    def warn_of_broken(self) -> None:
        """Log which plugins are broken: what their hooks would have done is missing."""
        for plugin in self._plugins:
            if plugin.status == "broken":
                reason = plugin.reason.rstrip(".")
                self._warn_once(f"the plugin {plugin.name!r} of {plugin} is broken: {reason}. {plugin.remedy}")

    def how_to_get(self, name: str) -> str:
        """Return how to install the part, command or hook `name`, and which plugins are there but cannot be used."""
        unusable = [plugin for plugin in self._plugins if plugin.status != "active"]
        notes = [f" {plugin.name} of {plugin} is {plugin.status}: {plugin.reason.rstrip('.')}." for plugin in unusable]
        return f"{install_command(extra_of(name.removeprefix('rlframework_')) or 'all')}.{''.join(notes)}"

    def _implementations(self, hook: str) -> Iterator[tuple[Plugin, pluggy.HookImpl]]:
        """Yield each plugin that implements `hook`, in the order in which pluggy would call them."""
        plugins = {plugin.name: plugin for plugin in self._plugins if plugin.status == "active"}
        for implementation in reversed(getattr(self.hook, hook).get_hookimpls()):
            yield plugins[implementation.plugin_name], implementation

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            _LOG.warning("warning: %s", message)

    def registered(self, kind: str) -> dict[str, Registered]:
        """Return the selectable records by name: not broken, not disabled and not duplicated."""
        return {name: found[0] for (of, name), found in self._found.items() if of == kind and len(found) == 1}

    def select(self, kind: str, name: str) -> Registered:
        """Return the record of `kind` named `name`.

        For an environment or an algorithm, `name` may be an import path `module:Class`.

        Raises `PluginError` if it is unknown, broken (from the original error), disabled or duplicated.
        """
        if kind in BASE_CLASSES and ":" in name:
            module = f"module {name.partition(':')[0]}"
            return Registered(own_record(kind, name), module, UNVERSIONED, module)
        found = self._found.get((kind, name), [])
        if len(found) > 1:
            raise PluginError(_duplicate(found))
        for broken in (plugin for plugin in self._plugins if plugin.status == "broken"):
            by_record = any((record.kind, record.name) == (kind, name) for record in broken.records)
            if by_record or (broken.name == name and not found):
                subject = f"{RECORD_TYPES[kind].key}: the plugin {broken.name!r}"
                reason = broken.reason.rstrip(".")
                raise PluginError(f"{subject} of {broken} is broken: {reason}. {broken.remedy}") from broken.error
        if found:
            return found[0]
        raise PluginError(" ".join(self._why_not(kind, name)))

    def load(self, record: Record) -> type:
        """Import the class named by `record.target`. Raises `PluginError` from any error of the import."""
        owners = (str(plugin) for plugin in self._plugins if any(record is own for own in plugin.records))
        blame = next(owners, "a plugin that this manager does not know")
        try:
            target = load_target(record.target)
        except (Exception, SystemExit) as error:  # reported with the plugin's name
            subject = f"the {record.kind} {record.name!r} of {blame}"
            raise PluginError(f"{subject} is broken: {one_line(error)} (while importing {record.target})") from error
        if not isinstance(target, type):
            raise PluginError(f"{record.target}, of {blame}, is not a class: {target!r}")
        return target

    def listing(self) -> list[PluginListing]:
        """Return one row per record, and one per plugin without records, with its status and the reason."""
        return [row for plugin in self._plugins for row in self._rows(plugin)]

    def fingerprint(self) -> dict[str, tuple[str, str]]:
        """Return the distribution and version of each active plugin, by plugin name."""
        active = (plugin for plugin in self._plugins if plugin.status == "active")
        return {plugin.name: (plugin.distribution, plugin.version) for plugin in active}

    def compare_fingerprint(self, theirs: Mapping[str, tuple[str, str]]) -> None:
        """Raise a `PluginError` that lists how the driver's fingerprint `theirs` differs from this process's."""
        ours, differences = self.fingerprint(), []
        unusable = {
            plugin.name: f"it {plugin.status} ({plugin}: {plugin.reason})"
            for plugin in self._plugins
            if plugin.status != "active"
        }
        for name in sorted({*ours, *theirs}):
            here, there = " ".join(ours.get(name, ("none",))), " ".join(theirs.get(name, ("none",)))
            if here != there:
                differences.append(f"{name}: the driver has {there}, this process has {unusable.get(name, here)}")
        if differences:
            raise PluginError(
                f"The driver and a worker have different plugins: {'; '.join(differences)}. Install the same "
                "distributions in both environments."
            )

    def _why_not(self, kind: str, name: str) -> Iterator[str]:
        """Yield the sentences that say why there is no such record, and what to do."""
        key = RECORD_TYPES[kind].key
        for plugin in self._plugins:
            records = {record.name for record in plugin.records if record.kind == kind}
            if plugin.name == name if plugin.disabled else name in records & self._disabled:
                yield f"{key}: the {kind} {name!r} ({plugin}) is disabled by {DISABLE_VARIABLE}."
                yield "Choose another one, or remove the name from that variable."
                return
        installed = self.registered(kind)
        available = [*installed, *(extra.replace("-", "_") for extra in extras())]
        near = next(iter(difflib.get_close_matches(name, available, n=1)), "")
        yield f"{key}: there is no {_NOUNS.get(kind, kind.replace('_', ' '))} {name!r}."
        meaning = self.hints("value_hint", key=key, value=name)
        near = "" if meaning else near
        if meaning or (near and (near in installed or extra_of(name) is None)):
            yield meaning or f"Did you mean {near!r}?"
        of_each = dict[str, list[str]]()
        for known, entry in installed.items():
            of_each.setdefault(entry.blame, []).append(known)
        listed = "; ".join(f"{', '.join(names)} ({blame})" for blame, names in of_each.items())
        yield f"Installed: {listed or 'none'}."
        for plugin in self._plugins:
            if plugin.status != "active":
                yield f"{plugin.name} of {plugin} is {plugin.status}: {plugin.reason.rstrip('.')}."
        wanted = extra_of(name) or extra_of(near)
        if wanted is not None and near not in installed:
            yield f"To install {wanted}: {install_command(wanted)}."
        else:
            yield (
                f"If {name!r} comes from a plugin, install its distribution with pip, or name its module under "
                "`plugins:` in the configuration; `rlframework plugins` lists the plugins that are found."
            )

    def _rows(self, plugin: Plugin) -> Iterator[PluginListing]:
        origin, state = (plugin.distribution, plugin.version), (plugin.status, plugin.reason)
        if not plugin.records:
            yield PluginListing(plugin.name, None, *origin, None, (), *state)
        for record in plugin.records:
            found, of_record = self._found.get((record.kind, record.name), []), state
            if plugin.status == "active" and record.name in self._disabled:
                of_record = ("disabled", DISABLE_VARIABLE)
            elif plugin.status == "active" and len(found) > 1:
                of_record = ("broken", _duplicate(found))
            capabilities = tuple(sorted(map(str, record.capabilities)))
            yield PluginListing(
                record.name, record.kind, *origin, record.api_version, capabilities, *of_record, record.summary
            )


def _duplicate(found: Sequence[Registered]) -> str:
    kind, name = found[0].record.kind, found[0].record.name
    blames = " and ".join(entry.blame for entry in found)
    return (
        f"{RECORD_TYPES[kind].key}: {len(found)} plugins register a {kind} {name!r}: {blames}. Uninstall one of them, "
        f"or add its distribution to {DISABLE_VARIABLE}."
    )
