"""Decide whether a run may write into its `output_dir`, and clear what an earlier run left there.

Every file falls into one of three groups:

- startup files: everything that a run writes before it finishes its first training step: the lock, `config.yaml`,
  `environment.json`, `restarts.jsonl`, and at most the metrics, samples and TensorBoard events of step 0. Replacing
  them loses no training, so a run that failed this early can simply be started again.
- results: everything else that a run writes. They are replaced only with `overwrite`.
- foreign files: all other files, and links. They are never deleted, and no run starts in a folder that contains any.

Nothing counts as written by a run unless the folder has a run's lock or a run's id.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.configure import dump_config
from rlframework.errors import ConfigError, UserError
from rlframework.files import LOCK_FILE, check_writable
from rlframework.observers.environment import ENVIRONMENT_FILE, read_environment
from rlframework.observers.jsonl import METRICS_FILE, SAMPLES_FILE

if TYPE_CHECKING:
    from rlframework.config.sections import RunConfig

_LOG = logging.getLogger(__name__)

_LISTED = 8
"""Entries that a message names."""

_TEMPORARY = r"\.[^/]+\.[0-9a-f]{12}\.(tmp|old)"
_WRITTEN = re.compile(
    rf"""
    \.lock | config\.yaml | environment\.json | restarts\.jsonl | metrics\.jsonl | samples\.jsonl | curve\.png
    | report\.html
    | tensorboard/events\.out\.tfevents\.[^/]+
    | wandb/.+
    | (model|adapter)/[^/]+\.(json|safetensors|jinja|model|txt|py|bin|distcp) | (model|adapter)/\.metadata
    | checkpoints/step-\d+/.+ | recorded/step-\d+/.+ | traces/step-\d+/.+
    | evaluations/([^/]+/)+(completions(\.partial)?\.jsonl|summary\.json) | evaluations/[^/]+/comparison\.json
    | ([^/]+/)?{_TEMPORARY}(/.+)?
    """,
    re.VERBOSE,
)
"""Paths of the files that runs, and the commands that read them, write below `output_dir`."""

_FOLDERS = frozenset({"adapter", "checkpoints", "evaluations", "model", "recorded", "tensorboard", "traces", "wandb"})


@dataclass(frozen=True)
class FolderContents:
    """The top-level names of a folder by group, as the module describes them. A name may be in several groups."""

    startup: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def deletable(self) -> list[str]:
        """The entries that a run with `overwrite` deletes."""
        return sorted({*self.startup, *self.results} - {LOCK_FILE})


def read_contents(folder: Path) -> FolderContents:
    """Classify everything in `folder`; empty if the folder does not exist."""
    if not folder.is_dir():
        return FolderContents()
    ours = (folder / LOCK_FILE).is_file() or "run_id" in read_environment(folder)
    without_steps = _has_no_step(folder / METRICS_FILE) if (folder / METRICS_FILE).is_file() else False
    groups: dict[str, set[str]] = {"startup": set(), "results": set(), "foreign": set()}
    for path, is_file in _leaves(folder):
        relative = path.relative_to(folder)
        group = _group(path, relative, is_file, without_steps) if ours else "foreign"
        groups[group].add(str(relative) if group == "foreign" else relative.parts[0])
    return FolderContents(**{group: tuple(sorted(names)) for group, names in groups.items()})


def problem(folder: Path, overwrite: bool = False) -> str | None:
    """Return why a run cannot start in `folder` and how to resolve it; None if it can."""
    contents = read_contents(folder)
    name = f"output_dir={str(folder)!r}"
    if contents.foreign:
        listed = _listed(contents.foreign)
        deletable = f" (it would delete {_listed(contents.deletable)})" if contents.deletable else ""
        return (
            f"{name} is not empty: it holds files that no run wrote ({listed}), and neither a run nor --overwrite"
            f"{deletable} touches these. Take another output_dir, or move them away"
        )
    if not contents.results or overwrite:
        return None
    from rlframework.training.checkpoints import newest_checkpoint  # imports torch, which takes seconds

    ways = "replace it (--overwrite), or take another output_dir"
    if newest_checkpoint(folder) is not None:
        ways = f"resume it (rlframework train --resume {folder}), {ways}"
    return f"{name} is not empty: it holds a run ({_listed(contents.results)}). Either {ways}"


def check_output_dir(config: RunConfig, overwrite: bool = False) -> None:
    """Raise `ConfigError` when the run of `config` cannot write to its folder, or may not replace what is in it."""
    folder = config.output_dir
    try:
        check_writable(folder)
    except UserError as error:
        raise ConfigError(f"output_dir={str(folder)!r}: {error}") from error
    if found := problem(folder, overwrite):
        raise ConfigError(found)
    for key, path in _inputs(dump_config(config)):
        if (top := _top_level(path, folder)) in read_contents(folder).deletable and top != "config.yaml":
            raise ConfigError(
                f"{key}={str(path)!r} is in output_dir={str(folder)!r}, and --overwrite would delete it. Take another "
                "output_dir"
            )


def check_no_results(folder: Path) -> None:
    """Raise `ConfigError` when another process has written results to `folder` since it was checked."""
    if read_contents(folder).results:
        raise ConfigError(problem(folder) or "")


def clear(folder: Path) -> None:
    """Delete what earlier runs wrote to `folder`, except its lock, which the caller holds; log what is deleted.

    The caller has checked the folder with `check_output_dir`.
    """
    contents = read_contents(folder)
    if contents.results:
        _LOG.info("overwriting %s: deleting %s", folder, _listed(contents.deletable))
    for name in contents.deletable:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _leaves(folder: Path) -> Iterator[tuple[Path, bool]]:
    """The files, links and empty folders below `folder`, each with whether it is a plain file."""
    for directory, folders, files in os.walk(folder):
        here = Path(directory)
        for name in [*folders, *files]:
            path = here / name
            if path.is_symlink() or name in files:
                yield path, path.is_file() and not path.is_symlink()
            elif not any(path.iterdir()):
                yield path, False


def _group(path: Path, relative: Path, is_file: bool, without_steps: bool) -> str:
    """Classify a leaf of a run's folder; `without_steps`: its metrics are there, and have no training step."""
    name = relative.as_posix()
    if not is_file:
        is_ours = relative.parts[0] in _FOLDERS or re.match(_TEMPORARY, name)
        return "startup" if is_ours and not path.is_symlink() else "foreign"
    if not _WRITTEN.fullmatch(name):
        return "foreign"
    if relative.parts[0] == "wandb":  # its files are not read, so the metrics decide
        return "startup" if without_steps else "results"
    check = _STARTUP.get(relative.parts[0])
    return "startup" if check is not None and check(path) else "results"


def _has_no_step(path: Path) -> bool:
    """Whether a file of JSON lines has none with a `step` above 0; a last line that was cut off does not count."""
    try:
        rows = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        return all(row["step"] <= 0 for row in rows)
    except (ValueError, KeyError, TypeError):
        return False


def _has_no_event(path: Path) -> bool:
    """Whether a TensorBoard file has no event with a `step` above 0.

    A record is the length of its event as a little-endian uint64, 4 bytes of checksum, the event and 4 bytes more. An
    event (a protobuf message) begins with its time, 9 bytes, followed by tag 0x10 if its step is not 0.
    """
    data, start = path.read_bytes(), 0
    while start + 12 <= len(data):
        event = data[start + 12 : start + 12 + int.from_bytes(data[start : start + 8], "little")]
        if event[9:10] == b"\x10":
            return False
        start += 16 + len(event)
    return True


def _always(path: Path) -> bool:
    return True


_STARTUP: Mapping[str, Callable[[Path], bool]] = {
    LOCK_FILE: _always,
    "config.yaml": _always,
    ENVIRONMENT_FILE: _always,
    "restarts.jsonl": _always,
    METRICS_FILE: _has_no_step,
    SAMPLES_FILE: _has_no_step,
    "tensorboard": _has_no_event,
}
"""Maps the first part of a path to a function that tests whether the file is a startup file."""


def _inputs(value: Any, key: str = "") -> Iterator[tuple[str, Path]]:
    """Yield the strings in a configuration that are existing paths, each with its dotted key."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _inputs(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _inputs(item, key)
    elif isinstance(value, str) and value and key != "output_dir" and len(value) < 4096 and os.path.exists(value):
        yield key, Path(value)


def _top_level(path: Path, folder: Path) -> str | None:
    """The entry of `folder` that is, or contains, `path`."""
    inside, outer = path.resolve(), folder.resolve()
    return inside.relative_to(outer).parts[0] if inside != outer and inside.is_relative_to(outer) else None


def _listed(names: Any) -> str:
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
