"""Decide whether a run may write into its `output_dir`, and clear what an earlier run left there.

Every file falls into one of three groups:

- startup files: everything that a run writes before it finishes its first training step: the lock, `config.yaml`,
  `environment.json`, `restarts.jsonl`, and at most the metrics, samples, judges' replies and TensorBoard events of
  step 0. Replacing them loses no training, so a run that failed this early can simply be started again.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlframework.base.errors import ConfigError, UserError
from rlframework.base.files import LOCK_FILE, check_writable
from rlframework.config.sections import RunConfig
from rlframework.observers.jsonl import METRICS_FILE, SAMPLES_FILE, TIMELINE_FILE
from rlframework.observers.run_environment import ENVIRONMENT_FILE, read_environment
from rlframework.plugins.configure import dump_config

_LOG = logging.getLogger(__name__)

_LISTED = 8
"""Entries that a message names."""

_TEMPORARY = r"\.[^/]+\.[0-9a-f]{12}\.(tmp|old)"
_WRITTEN = re.compile(
    rf"""
    \.lock | config\.yaml | environment\.json | restarts\.jsonl | metrics\.jsonl | samples\.jsonl | timeline\.jsonl
    | curve\.png | report\.html | report-figures/\w+\.png
    | tensorboard/events\.out\.tfevents\.[^/]+
    | sample_images/[0-9a-f]{{32}}\.jpg
    | wandb/.+ | judge/\w+\.jsonl
    | (model|adapter|critic)/[^/]+\.(json|safetensors|jinja|model|txt|py|bin|distcp) | (model|adapter|critic)/\.metadata
    | checkpoints/step-\d+/.+ | recorded/step-\d+/.+ | traces/step-\d+/.+
    | evaluations/([^/]+/)+(completions(\.partial)?\.jsonl|summary\.json) | evaluations/[^/]+/comparison\.json
    | ([^/]+/)?{_TEMPORARY}(/.+)?
    """,
    re.VERBOSE,
)
"""Paths of the files that runs, and the commands that read them, write below `output_dir`."""

_FOLDERS = (
    "adapter",
    "checkpoints",
    "critic",
    "evaluations",
    "judge",
    "model",
    "recorded",
    "report-figures",
    "sample_images",
    "tensorboard",
    "traces",
    "wandb",
)
_WITH_METRICS = ("judge", "sample_images", "wandb")
"""Folders whose files do not say of which step they are, so that the metrics decide."""
_ALWAYS_STARTUP = (LOCK_FILE, "config.yaml", ENVIRONMENT_FILE, "restarts.jsonl")


@dataclass(frozen=True)
class FolderContents:
    """The top-level names of a folder by group, as the module describes them. A name may be in several groups."""

    startup: Sequence[str] = ()
    results: Sequence[str] = ()
    foreign: Sequence[str] = ()

    @property
    def deletable(self) -> list[str]:
        """The entries that a run with `overwrite` deletes."""
        return sorted({*self.startup, *self.results} - {LOCK_FILE})


def read_contents(folder: Path) -> FolderContents:
    """Classify everything in `folder`; empty if the folder does not exist."""
    ours = (folder / LOCK_FILE).is_file() or "run_id" in read_environment(folder)
    groups: dict[str, set[str]] = {"startup": set(), "results": set(), "foreign": set()}
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink() and any(path.iterdir()):
            continue  # its files count
        relative = path.relative_to(folder)
        group = _group(folder, relative) if ours else "foreign"
        groups[group].add(str(relative) if group == "foreign" else relative.parts[0])
    return FolderContents(**{group: tuple(sorted(names)) for group, names in groups.items()})


def check_output_dir(config: RunConfig, overwrite: bool = False) -> None:
    """Raise `ConfigError` when the run of `config` cannot write to its folder, or may not replace what is in it."""
    folder = config.output_dir
    name = f"output_dir={str(folder)!r}"
    try:
        check_writable(folder)
    except UserError as error:
        raise ConfigError(f"{name}: {error}") from error
    contents = read_contents(folder)
    if contents.foreign:
        deletable = f" (it would delete {_listed(contents.deletable)})" if contents.deletable else ""
        raise ConfigError(
            f"{name} is not empty: it holds files that no run wrote ({_listed(contents.foreign)}), and neither a run "
            f"nor --overwrite{deletable} touches these. Take another output_dir, or move them away"
        )
    if contents.results and not overwrite:
        from rlframework.algorithms.checkpoints import newest_checkpoint  # imports torch, which takes seconds

        resume = "" if newest_checkpoint(folder) is None else f"resume it ({config.resume_command}), "
        raise ConfigError(
            f"{name} is not empty: it holds a run ({_listed(contents.results)}). Either {resume}replace it "
            "(--overwrite; in Python, overwrite=True), or take another output_dir"
        )
    for key, path in _inputs(dump_config(config)):
        if (top := _top_level(path, folder)) in contents.deletable and top != "config.yaml":
            raise ConfigError(
                f"{key}={str(path)!r} is in {name}, and --overwrite would delete it. Take another output_dir"
            )


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


def _group(folder: Path, relative: Path) -> str:
    """Classify a file, a link or an empty folder of a run's folder."""
    path, name, top = folder / relative, relative.as_posix(), relative.parts[0]
    if path.is_symlink():
        return "foreign"
    if not path.is_file():
        return "startup" if top in _FOLDERS or re.match(_TEMPORARY, name) else "foreign"
    if not _WRITTEN.fullmatch(name):
        return "foreign"
    if top == "tensorboard":
        startup = _has_no_event(path)
    elif top in (METRICS_FILE, SAMPLES_FILE, TIMELINE_FILE, *_WITH_METRICS):
        startup = _has_no_step(folder / (METRICS_FILE if top in _WITH_METRICS else top))
    else:
        startup = top in _ALWAYS_STARTUP
    return "startup" if startup else "results"


def _has_no_step(path: Path) -> bool:
    """Whether a file of JSON lines has none with a `step` above 0; a last line that was cut off does not count."""
    try:
        return all(json.loads(line)["step"] <= 0 for line in path.read_bytes().split(b"\n")[:-1])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _has_no_event(path: Path) -> bool:
    """Whether a TensorBoard file has no event with a `step` above 0; a last event that was cut off does not count."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return all(event.step <= 0 for event in EventFileLoader(str(path)).Load())


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


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
