"""Which keys the `config.yaml` of a run may not decide: those that run code, and those that send data elsewhere.

A run's folder may come from anybody. Keys annotated with `NeedsTrust` count only from the command line, from a file
that the user names as a configuration, or with `--trust-run`. Keys annotated with `ImportsCode` count from a run too:
the user installed what they import, or has it in the current directory. A module in the run's folder needs trust.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlframework.base.errors import ConfigError
from rlframework.config.base import ImportsCode, NeedsTrust
from rlframework.config.load import leaves
from rlframework.config.problems import NOT_GIVEN
from rlframework.config.yaml_text import Keys, Tree

_WRITTEN_BY_RUNS = ("model", "adapter", "critic", "checkpoints")


def require_trusted_imports(run: Path, tree: Tree, others: Sequence[str] = ()) -> None:
    """Raise `ConfigError` if loading `tree`, the configuration in the folder `run`, would import code from that folder.

    Looks at the keys that are imported before a configuration is validated, and at the import paths `others`, without
    importing anything.
    """
    plugins = tree.get(("plugins",))
    named = [("plugins", name) for name in plugins] if isinstance(plugins, list) else []
    for section in ("environment", "algorithm"):
        name = tree.get((section, "name"))
        named += [(f"{section}.name", name)] if isinstance(name, str) and ":" in name else []
    named += [("its files", name) for name in others]
    problems = [f"{key} {problem}" for key, name in named if (problem := _import_problem(run, name))]
    here = Path.cwd().resolve()
    if here.is_relative_to(run.resolve()) and (code := _importable(here)):
        problems.append(f"the current directory is in it, where Python would import {code}")
    _require_none(run, problems)


def require_trusted(run: Path, tree: Tree, config: BaseModel) -> None:
    """Raise `ConfigError` if `config`, which `tree` in the folder `run` describes, has values that need trust."""
    _require_none(
        run, [text for keys, value, mark in _marked(config) if (text := _problem(run, tree, keys, value, mark))]
    )


def require_own_files(run: Path) -> None:
    """Raise `ConfigError` if a file in the folder `run` is a link to one elsewhere, which resuming would write to."""
    links = [path for path in sorted(run.iterdir()) if path.is_symlink() and not path.is_dir()]
    _require_none(
        run, [f"{path.name} is a link to {path.resolve()}" for path in links if not _is_inside(path.resolve(), run)]
    )


def needs_trust(config: BaseModel) -> bool:
    """Whether `config` has values that only the user may give, not the folder of a run."""
    return any(isinstance(mark, NeedsTrust) and value not in mark.harmless for _, value, mark in _marked(config))


def _require_none(run: Path, problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError(
            f"the run in {run} asks for what its own files may not decide: {'; '.join(dict.fromkeys(problems))}. If "
            "you trust the author of this run, allow it with --trust-run (in Python, "
            "resume(..., trust_run=True)), or repeat the key on the command line"
        )


def _marked(config: BaseModel, above: Keys = ()) -> Iterator[tuple[Keys, Any, NeedsTrust | ImportsCode]]:
    """The annotated keys of `config` and its sections that have another value than their default."""
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from _marked(value, (*above, name))
        elif isinstance(value, Mapping) and any(isinstance(each, BaseModel) for each in value.values()):
            for key, each in value.items():
                yield from _marked(each, (*above, name, key))
        elif value != info.get_default(call_default_factory=True):
            marks = [mark for mark in info.metadata if isinstance(mark, (NeedsTrust, ImportsCode))]
            yield from (((*above, name), value, mark) for mark in marks)


def _problem(run: Path, tree: Tree, keys: Keys, value: Any, mark: NeedsTrust | ImportsCode) -> str:
    """Why `value` at `keys` needs trust; empty if it does not, or if the command line gave all of it."""
    while tree.get(keys) is NOT_GIVEN and len(keys) > 1:  # a shorthand for a section
        keys = keys[:-1]
    if all(leaf in tree.overridden for leaf in leaves(tree.get(keys), keys)):
        return ""
    name = ".".join(map(str, keys))
    if isinstance(mark, ImportsCode):
        paths = [value] if isinstance(value, str) else list(value)
        return "; ".join(f"{name} {problem}" for path in paths if (problem := _import_problem(run, path)))
    shown = sorted(value) if isinstance(value, Mapping) else value  # without the values, which may be secrets
    return "" if value in mark.harmless else f"{name}={shown!r}, which {mark.effect}"


def _import_problem(run: Path, path: Any) -> str:
    inside = next((file for file in _files_of_module(str(path).partition(":")[0]) if _is_inside(file, run)), None)
    return f"imports {inside}, which is in its folder" if inside else ""


def _is_inside(file: Path, folder: Path) -> bool:
    return file.is_relative_to(folder.absolute()) or file.resolve().is_relative_to(folder.resolve())


def _files_of_module(name: str) -> Iterator[Path]:
    """The files that importing `name` would run, with the current directory importable: packages, then the module.

    `importlib.util.find_spec` would run the packages.
    """
    search: Sequence[str] | None = [*sys.path, str(Path.cwd())]
    for part in name.split("."):
        spec = None if search is None else PathFinder.find_spec(part, search)
        if spec is None:
            return
        if spec.origin is not None:
            yield Path(spec.origin).absolute()
        search = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)


def _importable(folder: Path) -> str:
    """The name of a file or folder in `folder` that Python could import, other than folders that a run writes."""
    endings = tuple(all_suffixes())
    for entry in sorted(folder.iterdir()):
        inside = entry.rglob("*") if entry.is_dir() and entry.name not in _WRITTEN_BY_RUNS else [entry]
        if any(path.name.endswith(endings) and path.is_file() for path in inside):
            return entry.name
    return ""
