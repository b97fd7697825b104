"""From the template to a folder: whole, or not at all.

The template is plain text beside this module, with `$name` and the like filled in by `string.Template`.
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
    "$package/worker.py": "worker.py.txt",
    "tests/test_conformance.py": "test_conformance.py.txt",
    "tests/test_plugin.py": "test_plugin.py.txt",
}
"""What is written, to the file of the template that it is made from."""


def write_backend(name: str, directory: str | Path | None = None) -> Path:
    """Write a distribution for the backend `name` into `directory`, or into a folder of its name; the folder.

    A `ConfigError` for a name that cannot be taken and for a folder that has something in it: nothing is written then.
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
    """The text of each file, by its path in the folder."""
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
    """The versions of core that a backend made with `version` asks for: up to the next that may break it."""
    found = Version(version)
    following = f"0.{found.minor + 1}" if found.major == 0 else str(found.major + 1)
    return f">={version},<{following}"


def _require_free(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"--directory {folder}: it is there, and is no folder; name another place")
    if not folder.exists():
        return
    if any(folder.iterdir()):
        raise ConfigError(f"--directory {folder}: there is something in it; name a folder that is not there yet")
    if folder.samefile(Path.cwd()):  # it is exchanged for the new one, and whoever is in it would not see that
        raise ConfigError(f"--directory {folder}: it is the current one; go one up, and name it from there")


def next_commands(name: str, folder: Path) -> str:
    """What to type next, a command a line."""
    near = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    return "\n".join(
        [
            f"  cd {shlex.quote(str(near))}",
            '  pip install -e ".[dev]"',
            "  rlframework plugins",
            f"  rlframework conformance {name} --layout data=1",
        ]
    )
