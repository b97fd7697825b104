"""Finds plugins, imports them, and reads and checks the records of their hooks. Errors are kept with each plugin.

pluggy accepts a hook of any name, a function without its marker, and any return value. Each of these is an error in
this module, so that a plugin never silently does nothing. The manager selects among the plugins.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

import pluggy

import rlframework
from rlframework.base.errors import PluginError
from rlframework.base.logs import log_if_slow
from rlframework.config.policy import PolicyConfig
from rlframework.plugins import hookspec as specs
from rlframework.plugins.installation import CORE, installation_error
from rlframework.plugins.types import OWN_CAPABILITY, RECORD_TYPES, Capability, Record

UNVERSIONED = "unversioned"
DISABLE_VARIABLE = "RLFRAMEWORK_DISABLE_PLUGINS"


@dataclass
class Plugin:
    """A plugin: its origin and, after `load`, its records or why it is broken.

    `name` is that of its entry point or module. A `disabled` plugin is not even imported. `records` are those that
    could be read, even if the plugin is broken.
    """

    name: str
    distribution: str
    version: str
    module: str
    import_: Callable[[], object]
    disabled: bool = False
    loaded: object | None = None
    records: Sequence[Record] = ()
    error: BaseException | None = None

    def __str__(self) -> str:
        """Return `distribution version`, for error messages."""
        return f"{self.distribution} {self.version}"

    @property
    def status(self) -> str:
        """`active`, `disabled` or `broken`."""
        return "disabled" if self.disabled else "active" if self.error is None else "broken"

    @property
    def reason(self) -> str:
        """Why the plugin is not active; "" if it is."""
        return DISABLE_VARIABLE if self.disabled else "" if self.error is None else one_line(self.error)

    @property
    def how_to_disable(self) -> str:
        """The setting that leaves the plugin out."""
        return f"{DISABLE_VARIABLE}={self.name if ' ' not in self.name else self.distribution}"

    @property
    def remedy(self) -> str:
        """The sentence that says what to do if the plugin fails."""
        module = self.distribution.startswith("module ")
        repair = f"Correct the {self.distribution}" if module else f"Reinstall or update {self.distribution}"
        return f"{repair}, or disable it: {self.how_to_disable}."

    def load(self) -> None:
        """Import the plugin and read its records. Its errors are stored, never raised."""
        if self.error is not None:  # of its installation
            return
        with log_if_slow(f"the import of {self.name} of {self}", logging.WARNING, self.how_to_disable):
            self._load()

    def _load(self) -> None:
        try:
            self.loaded = self.import_()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # stored: a plugin that exits Python is just broken
            self.error = error
            return
        if self.version == UNVERSIONED:
            package = sys.modules.get(self.module.partition(".")[0])
            self.version = str(getattr(package, "__version__", UNVERSIONED))
        self.records, self.error = read_plugin(self.loaded)


def find_plugins(modules: Sequence[str]) -> list[Plugin]:
    """Return the built-in plugins, entry points by name, and modules without an entry point, under unique names."""
    try:
        version = metadata.version(CORE)
    except metadata.PackageNotFoundError:  # running from a source tree that is not installed
        version = rlframework.__version__
    builtin = "rlframework.plugins.builtin"
    plugins = [Plugin("core", CORE, version, builtin, partial(importlib.import_module, builtin))]
    for entry in metadata.entry_points(group=specs.PROJECT):
        info = entry.dist.metadata if entry.dist else None  # read once: each access parses the file
        origin = (info["Name"], info["Version"]) if info else ("unknown distribution", UNVERSIONED)
        error = installation_error(info, version) if info else None
        plugins.append(Plugin(entry.name, *origin, entry.value, entry.load, error=error))
    plugins.sort(key=lambda plugin: (plugin.module != builtin, plugin.name, plugin.distribution))
    for module in dict.fromkeys(modules):
        if all(plugin.module != module for plugin in plugins):
            import_ = partial(importlib.import_module, module)
            plugins.append(Plugin(module, f"module {module}", UNVERSIONED, module, import_))
    taken = set[str]()
    for plugin in plugins:
        if plugin.name in taken:
            plugin.name = f"{plugin.name} ({plugin.distribution})"
        taken.add(plugin.name)
    return plugins


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
        for kind, record_type in RECORD_TYPES.items():
            hook = f"{specs.PROJECT}_{kind}s"
            for returned in getattr(scratch.hook, hook)():
                if isinstance(returned, str) or not isinstance(returned, Iterable):
                    found = type(returned).__name__
                    raise PluginError(f"{hook} returned {found}; it must return a list of {record_type.__name__}")
                for record in returned:
                    if not isinstance(record, record_type):
                        item, wanted = type(record).__name__, record_type.__name__
                        raise PluginError(f"{hook} returned a list that contains a {item}; all items must be {wanted}")
                    records.append(record)
        for record in records:
            _check_record(record)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # kept as the reason
        return records, error
    return records, None


def check_model(record: Record) -> None:
    """Raise `PluginError` if the record's `config_model` does not derive from the base of its kind."""
    model, base = record.config_model, record.section
    if model is not None and not (isinstance(model, type) and issubclass(model, base)):
        raise PluginError(
            f"config_model of the {record.kind} {record.name!r} must be a class derived from "
            f"{base.__module__}.{base.__name__}, not {model!r}"
        )


@cache
def extras() -> frozenset[str]:
    """The extras of rlframework-core that bring what a configuration or the command line can name."""
    try:
        names = metadata.metadata(CORE).get_all("Provides-Extra") or ()
    except metadata.PackageNotFoundError:  # running from a source tree that is not installed
        names = ()
    return frozenset(names) - {"all", "dev", "docs"}


def extra_of(name: str) -> str | None:
    """The extra of rlframework-core that is called as the part or command `name`, or None."""
    extra = name.replace("_", "-")
    return extra if extra in extras() else None


def install_command(extra: str, quote: str = "") -> str:
    """Return the command that installs an extra of rlframework-core, with `quote` around it.

    Where core runs from a clone of the repository, the distributions of the extra are installed from there, too.
    """
    clone = Path(rlframework.__file__).parents[1]
    if not (clone / "plugins").is_dir():
        command = f"{quote}pip install 'rlframework-core[{extra}]'{quote}"
        return f"{command} (from the wheels of a release: with --find-links WHEELS)"
    names, others = _requirements(extra)
    root = "" if clone == Path.cwd() else f"{clone}/"
    parts = [f"-e {root}plugins/{name}" for name in sorted(names) if (clone / "plugins" / name).is_dir()]
    if others or not parts:
        parts.insert(0, f"-e '{root.rstrip('/') or '.'}[{extra}]'")
    return f"{quote}pip install {' '.join(parts)}{quote}"


def _requirements(extra: str) -> tuple[set[str], bool]:
    """Return the names of our distributions that an extra of core brings, and whether it brings others, too."""
    from packaging.requirements import Requirement  # of transformers; seldom needed, and 30 ms

    try:
        requirements = list(map(Requirement, metadata.requires(CORE) or ()))
    except metadata.PackageNotFoundError:  # running from a source tree that is not installed
        requirements = []
    names, others = set[str](), False
    for requirement in requirements:
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name == CORE:
            for inner in requirement.extras:
                of_inner, more = _requirements(inner)
                names, others = names | of_inner, others or more
        elif requirement.name.startswith("rlframework-"):
            names.add(requirement.name.removeprefix("rlframework-"))
        else:
            others = True
    return names, others


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the word of `known` that is most similar, or "" if none is."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def one_line(error: BaseException) -> str:
    """Return the error on one line, with its class unless it is one of rlframework's."""
    text, kind = " ".join(str(error).split()), type(error)
    if kind.__module__ == "rlframework.base.errors":
        return text
    return f"{kind.__name__}: {text}" if text else kind.__name__


def _check_hooks(scratch: pluggy.PluginManager, plugin: object) -> None:
    known = [name for name in vars(specs) if name.startswith(f"{specs.PROJECT}_")]
    callers = {caller.name: caller for caller in scratch.get_hookcallers(plugin) or ()}
    for name, caller in callers.items():
        (implementation,) = caller.get_hookimpls()
        if not caller.has_spec() and not implementation.optionalhook:
            raise PluginError(f"unknown hook {name!r}.{did_you_mean(name, known)}")
        if implementation.kwargnames:
            defaults = ", ".join(implementation.kwargnames)
            raise PluginError(
                f"the hook {name} has default values for {defaults}; remove the defaults or the arguments"
            )
    for name in known:
        if name not in callers and callable(getattr(plugin, name, None)):
            raise PluginError(
                f"{name} is not marked as a hook; decorate it with @hookimpl from rlframework.plugins.hookspec"
            )
    if not callers:
        raise PluginError("it implements no hook of rlframework; rlframework.plugins.hookspec lists them")


def _check_record(record: Record) -> None:
    who = f"the {record.kind} name {record.name!r}"
    if record.api_version != record.supported_api:
        older = record.api_version < record.supported_api
        raise PluginError(
            f"its {record.kind} {record.name!r} is written for version {record.api_version} of the plugin API, but "
            f"this rlframework-core has version {record.supported_api} for that kind; install compatible versions of "
            "the two" + (f" ({record.moving})" if older and record.moving else "")
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", record.name):
        raise PluginError(f"{who} is invalid: use letters, digits, '-' and '_', starting with a letter or digit")
    if record.kind == "policy_worker" and record.name in PolicyConfig.model_fields:
        raise PluginError(f"{who} is a key of the section `policy`; choose another name")
    if not re.fullmatch(r"[\w.]+:[\w.]+", record.target):
        raise PluginError(f"the target {record.target!r} of {record.name!r} must have the form 'package.module:Class'")
    check_model(record)
    _check_capabilities(record)


def _check_capabilities(record: Record) -> None:
    """Raise `PluginError` for a capability that is neither one of the record's kind nor the plugin's own."""
    supported = ", ".join(sorted(record.supported_capabilities)) or "none"
    allowed = f"capabilities of the kind {record.kind}: {supported}"
    for capability in sorted(map(str, record.capabilities - record.supported_capabilities)):
        if capability in set(Capability):
            kinds = [kind for kind, each in RECORD_TYPES.items() if capability in each.supported_capabilities]
            raise PluginError(
                f"{record.name!r} declares the capability {capability}, one of {' and '.join(kinds)}; {allowed}"
            )
        if not OWN_CAPABILITY.fullmatch(capability):
            raise PluginError(
                f"{record.name!r} declares the unknown capability {capability!r}; {allowed}. Write one of your own "
                "with a prefix, of letters, digits and '_': 'acme:sparse_attention'"
            )
