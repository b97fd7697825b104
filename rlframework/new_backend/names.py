"""Valid names for a new backend, and the names derived from it."""

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
"""Maximum length of a name, so that lines of the template stay within the limit."""


@dataclass(frozen=True)
class Names:
    """The names derived from `name`, which selects the backend in the configuration."""

    name: str

    @property
    def package(self) -> str:
        """The name of the Python package."""
        return f"rlframework_{self.name}"

    @property
    def distribution(self) -> str:
        """The name of the distribution and of its folder."""
        return f"rlframework-{self.name.replace('_', '-')}"

    @property
    def camel(self) -> str:
        """The prefix of class names."""
        return "".join(part[:1].upper() + part[1:] for part in self.name.split("_"))


def checked_names(name: str) -> Names:
    """Return the names for a backend `name`. Raises `ConfigError` if the name is invalid or already in use."""
    if problem := _spelling(name) or _taken(name):
        raise ConfigError(f"{name!r} cannot be the name of a backend: {problem}")
    return Names(name)


def _spelling(name: str) -> str | None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        return "it becomes part of a package name; use lowercase letters, digits and single '_', starting with a letter"
    if len(name) > LONGEST:
        return f"it has {len(name)} characters, but at most {LONGEST} are allowed; choose a shorter name"
    if keyword.iskeyword(name) or name in sys.stdlib_module_names:
        return "it is a Python keyword or standard module; choose another name"
    if name in PolicyConfig.model_fields:
        return f"`policy.{name}` is already a configuration key; choose another name"
    return None


def _taken(name: str) -> str | None:
    found = next((row for row in create_manager(disabled=()).listing() if _is_backend(row, name)), None)
    if found is not None:
        return (
            f"it is used by {found.distribution} {found.version}; choose another name, or uninstall that distribution"
        )
    names = Names(name)
    if find_spec(names.package) is not None:
        return f"the Python module {names.package} already exists; choose another name, or uninstall it"
    with suppress(PackageNotFoundError):
        version = version_of(names.distribution)
        return f"{names.distribution} {version} is already installed; choose another name, or uninstall it"
    return None


def _is_backend(row: PluginListing, name: str) -> bool:
    """Whether `row` is a backend with that name, or an unreadable plugin with it."""
    return row.name == name and row.kind in ("policy_worker", None)
