"""Writes the template to a folder, atomically.

The template is plain text next to this module, in which `string.Template` replaces `$name` and other placeholders.
"""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path
from string import Template

from packaging.version import Version

from rlframework import __version__
from rlframework.errors import ConfigError
from rlframework.files import replacing_directory
from rlframework.new_backend.names import Names, checked_names

FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    ".gitignore": "gitignore.txt",
    ".github/workflows/ci.yml": "ci.yml.txt",
    "$package/__init__.py": "init.py.txt",
    "$package/py.typed": "py.typed.txt",
    "$package/plugin.py": "plugin.py.txt",
    "$package/config.py": "config.py.txt",
    "$package/engine.py": "engine.py.txt",
    "$package/worker.py": "worker.py.txt",
    "tests/test_conformance.py": "test_conformance.py.txt",
    "tests/test_plugin.py": "test_plugin.py.txt",
}
"""Maps the path of each file to write to its template file."""


def write_backend(name: str, directory: str | Path | None = None) -> Path:
    """Write a distribution for the backend `name` to `directory` (default: a folder of its name); return the folder.

    Raises `ConfigError`, and writes nothing, if the name is invalid or in use, or if the folder is not empty.
    """
    names = checked_names(name)
    folder = Path(names.distribution if directory is None else directory).absolute()
    _require_free(folder)
    texts = backend_files(names)
    with replacing_directory(folder) as new:
        for path, text in texts.items():
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).write_text(text, encoding="utf-8")
    return folder


def backend_files(names: Names) -> dict[str, str]:
    """Return the text of each file, by its path in the folder."""
    words = {
        "name": names.name,
        "package": names.package,
        "distribution": names.distribution,
        "camel": names.camel,
        "core": core_range(__version__),
    }
    template = files("rlframework.new_backend") / "template"
    return {
        Template(path).substitute(words): Template((template / source).read_text(encoding="utf-8")).substitute(words)
        for path, source in FILES.items()
    }


def core_range(version: str) -> str:
    """Return the versions of core that a backend created with `version` requires: up to the next breaking release."""
    found = Version(version)
    following = f"0.{found.minor + 1}" if found.major == 0 else str(found.major + 1)
    return f">={version},<{following}"


def _require_free(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"--directory {folder}: it exists and is not a folder; choose another location")
    if not folder.exists():
        return
    if any(folder.iterdir()):
        raise ConfigError(f"--directory {folder}: it is not empty; choose a new folder")
    if folder.samefile(Path.cwd()):  # the shell would be left in the deleted old directory
        raise ConfigError(f"--directory {folder}: it is the current directory; change to its parent directory first")


def next_commands(name: str, folder: Path) -> str:
    """Return the commands to run next, one per line."""
    near = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    return "\n".join(
        [
            f"  cd {shlex.quote(str(near))}",
            '  pip install -e ".[dev]"',
            "  rlframework plugins",
            f"  rlframework conformance {name} --layout data=1",
        ]
    )
