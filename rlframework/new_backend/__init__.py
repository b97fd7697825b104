"""`rlframework new-backend NAME`: creates a plugin distribution to fill in, which is installable right away.

The folder `template` has each file with the suffix `.txt`; `string.Template` replaces placeholders such as `$name`. Its
folder `package` becomes the Python package.

Not supported: other kinds of plugins (`examples/plugins/` has one of each), and publishing.
"""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from string import Template

from packaging.version import Version

from rlframework import __version__
from rlframework.config.policy import PolicyConfig
from rlframework.errors import ConfigError
from rlframework.files import replacing_directory
from rlframework.plugins.manager import create_manager

LONGEST = 24
"""Maximum length of a name, so that lines of the template stay within the limit."""

TEMPLATE = Path(__file__).parent / "template"


def write_backend(name: str, directory: str | Path | None = None) -> Path:
    """Write a distribution for the backend `name` to `directory` (default: a folder of its name); return the folder.

    Raises `ConfigError`, and writes nothing, if the name is invalid or in use, or if the folder is not empty.
    """
    if problem := _spelling(name) or _taken(name):
        raise ConfigError(f"{name!r} cannot be the name of a backend: {problem}")
    folder = Path(_words(name)["distribution"] if directory is None else directory).absolute()
    _require_free(folder)
    with replacing_directory(folder) as new:
        for path, text in backend_files(name).items():
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).write_text(text, encoding="utf-8")
    return folder


def backend_files(name: str) -> dict[str, str]:
    """Return the text of each file of the backend `name`, by its path in the folder."""
    words, found = _words(name), {}
    for source in sorted(TEMPLATE.rglob("*.txt")):
        folder, path = source.parent.relative_to(TEMPLATE), source.name.removesuffix(".txt")
        folder = Path(words["package"]) if folder == Path("package") else folder
        found[str(folder / path)] = Template(source.read_text(encoding="utf-8")).substitute(words)
    return found


def _words(name: str) -> dict[str, str]:
    """The placeholders of the template: `name` and the names derived from it."""
    return {
        "name": name,
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


def next_commands(name: str, folder: Path) -> str:
    """Return the commands to run next, one per line."""
    near = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    steps = (
        f"cd {shlex.quote(str(near))}",
        'pip install -e ".[dev]"',
        "rlframework plugins",
        f"rlframework conformance {name} --layout data=1",
    )
    return "\n".join(f"  {step}" for step in steps)


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
    for row in create_manager(disabled=()).listing():
        if row.name == name and row.kind in ("policy_worker", None):  # None: a plugin that could not be read
            return (
                f"it is used by {row.distribution} {row.version}; choose another name, or uninstall that distribution"
            )
    package, distribution = (_words(name)[key] for key in ("package", "distribution"))
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
