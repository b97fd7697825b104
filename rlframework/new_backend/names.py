"""What a new backend may be called, and what else is named after it."""

from __future__ import annotations

import keyword
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from importlib.util import find_spec

from rlframework.config.policy import PolicyConfig
from rlframework.errors import ConfigError
from rlframework.plugins.listing import PluginListing
from rlframework.plugins.manager import create_manager

LONGEST = 24
"""Letters of a name: the template's lines have room for so many."""


@dataclass(frozen=True)
class Names:
    """`name`: the word in the configuration; the rest follows from it."""

    name: str

    @property
    def package(self) -> str:
        """Of the Python package."""
        return f"rlframework_{self.name}"

    @property
    def distribution(self) -> str:
        """Of what pip installs, and of the folder that it is written into."""
        return f"rlframework-{self.name.replace('_', '-')}"

    @property
    def camel(self) -> str:
        """What the classes begin with."""
        return "".join(part[:1].upper() + part[1:] for part in self.name.split("_"))


def checked_names(name: str) -> Names:
    """The names for a backend `name`; a `ConfigError` where it cannot be a name, or is taken here."""
    if problem := _spelling(name) or _taken(name):
        raise ConfigError(f"no backend can be called {name!r}: {problem}")
    return Names(name)


def _spelling(name: str) -> str | None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        return "it becomes the name of a Python package; use small letters, digits and single '_', a letter first"
    if len(name) > LONGEST:
        return f"it has {len(name)} letters, and {LONGEST} are the most; choose a shorter one"
    if keyword.iskeyword(name) or name in sys.stdlib_module_names:
        return "it is a word or a standard module of Python; choose another name"
    if name in PolicyConfig.model_fields:
        return f"`policy.{name}` is a key of the configuration already; choose another name"
    return None


def _taken(name: str) -> str | None:
    found = next((row for row in create_manager(disabled=()).listing() if _is_backend(row, name)), None)
    if found is not None:
        return f"{found.distribution} {found.version} is installed and has it; choose another name, or uninstall that"
    names = Names(name)
    if find_spec(names.package) is not None:
        return f"there is a Python module {names.package} already; choose another name, or uninstall that"
    with suppress(PackageNotFoundError):
        version = version_of(names.distribution)
        return f"{names.distribution} {version} is installed; choose another name, or uninstall that"
    return None


def _is_backend(row: PluginListing, name: str) -> bool:
    """Whether `row` is a backend of that name, or a plugin that cannot be read and has it."""
    return row.name == name and row.kind in ("policy_worker", None)
