"""`rlframework new-backend NAME`: creates a plugin distribution, of a training backend or a generation engine.

It is installable right away: a backend's methods are to be filled in, an engine is complete and slow. The folder
`template` has each file with the suffix `.txt`, those of all kinds in `common`; `string.Template` replaces placeholders
such as `$name`. A folder `package` becomes the Python package.

Not supported: other kinds of plugins (`examples/plugins/` has one of each), and publishing.
"""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from string import Template

from packaging.version import Version

from rlframework import __version__
from rlframework.base.errors import ConfigError
from rlframework.base.files import replacing_directory
from rlframework.config.policy import PolicyConfig
from rlframework.plugins.discovery import extra_of
from rlframework.plugins.manager import create_manager
from rlframework.plugins.types import (
    RECORD_TYPES,
    GenerationEngineRecord,
    PolicyWorkerRecord,
)

LONGEST = 24
"""Maximum length of a name, so that lines of the template stay within the limit."""

TEMPLATE = Path(__file__).parent / "template"

BACKEND, ENGINE = PolicyWorkerRecord.kind, GenerationEngineRecord.kind
TITLES: Mapping[str, str] = {BACKEND: "training backend", ENGINE: "generation engine"}
"""The kinds of plugins that there are templates for, in words."""


def write_plugin(name: str, directory: str | Path | None = None, kind: str = BACKEND) -> Path:
    """Write a distribution for the plugin `name` to `directory` (default: a folder of its name); return the folder.

    Raises `ConfigError`, and writes nothing, if the name is invalid or in use, or if the folder is not empty.
    """
    if kind not in TITLES:
        raise ConfigError(f"--kind {kind}: it must be one of {', '.join(TITLES)}")
    if problem := _spelling(name, kind) or _taken(name, kind):
        raise ConfigError(f"{name!r} cannot be the name of a {TITLES[kind]}: {problem}")
    folder = Path(_words(name, kind)["distribution"] if directory is None else directory).absolute()
    _require_free(folder)
    with replacing_directory(folder) as new:
        for path, text in plugin_files(name, kind).items():
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).write_text(text, encoding="utf-8")
    return folder


def plugin_files(name: str, kind: str = BACKEND) -> dict[str, str]:
    """Return the text of each file of the plugin `name`, by its path in the folder."""
    words, found = _words(name, kind), {}
    for template in (TEMPLATE / "common", TEMPLATE / kind):
        for source in sorted(template.rglob("*.txt")):
            folder, path = source.parent.relative_to(template), source.name.removesuffix(".txt")
            folder = Path(words["package"]) if folder == Path("package") else folder
            found[str(folder / path)] = Template(source.read_text(encoding="utf-8")).substitute(words)
    return found


def _words(name: str, kind: str) -> dict[str, str]:
    """The placeholders of the template: `name` and the names derived from it, and those of the kind."""
    return {
        "name": name,
        "title": TITLES[kind],
        "key": RECORD_TYPES[kind].key,
        "package": f"rlframework_{name}",
        "distribution": f"rlframework-{name.replace('_', '-')}",
        "camel": "".join(part.capitalize() for part in name.split("_")),
        "core": core_range(__version__),
    }


def core_range(version: str) -> str:
    """Return the versions of core that a backend created with `version` requires: up to the next breaking release."""
    found = Version(version)
    following = f"0.{found.minor + 1}" if found.major == 0 else str(found.major + 1)
    return f">={version},<{following}"


def next_commands(name: str, folder: Path, kind: str = BACKEND) -> str:
    """Return the commands to run next, one per line."""
    near = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    steps = (
        f"cd {shlex.quote(str(near))}",
        'pip install -e ".[dev]"',
        "rlframework plugins",
        f"rlframework conformance {name}" + (" --layout data=1" if kind == BACKEND else ""),
    )
    return "\n".join(f"  {step}" for step in steps)


def _spelling(name: str, kind: str) -> str | None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        return "it becomes part of a package name; use lowercase letters, digits and single '_', starting with a letter"
    if len(name) > LONGEST:
        return f"it has {len(name)} characters, but at most {LONGEST} are allowed; choose a shorter name"
    if keyword.iskeyword(name) or name in sys.stdlib_module_names:
        return "it is a Python keyword or standard module; choose another name"
    if kind == BACKEND and name in PolicyConfig.model_fields:
        return f"`policy.{name}` is already a configuration key; choose another name"
    return None


def _taken(name: str, kind: str) -> str | None:
    for row in create_manager(disabled=()).listing():
        if row.name == name and row.kind in (kind, None):  # None: a plugin that could not be read
            return (
                f"it is used by {row.distribution} {row.version}; choose another name, or uninstall that distribution"
            )
    if extra_of(name) is not None:
        return "it is the name of one of rlframework's own distributions; choose another name"
    package, distribution = (_words(name, kind)[key] for key in ("package", "distribution"))
    if find_spec(package) is not None:
        return f"the Python module {package} already exists; choose another name, or uninstall it"
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version(distribution)
        return f"{distribution} {version} is already installed; choose another name, or uninstall it"
    return None


def _require_free(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"--directory {folder}: it exists and is not a folder; choose another location")
    if not folder.exists():
        return
    if any(folder.iterdir()):
        raise ConfigError(f"--directory {folder}: it is not empty; choose a new folder")
    if folder.samefile(Path.cwd()):  # the shell would be left in the deleted old directory
        raise ConfigError(f"--directory {folder}: it is the current directory; change to its parent directory first")
