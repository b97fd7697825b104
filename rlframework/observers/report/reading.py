"""Reads a run's directory for the report: metrics, samples, configuration, environment.

Only `metrics.jsonl` is required. An incomplete last line, left by a killed run, is ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlframework.errors import DataError, UserError
from rlframework.observers.environment import ENVIRONMENT_FILE
from rlframework.observers.jsonl import METRICS_FILE, SAMPLES_FILE, read_history

CONFIG_FILE, MODEL = "config.yaml", "model"


@dataclass(frozen=True)
class Run:
    """The data of one run. `config` and `environment` are None if the run has no such file."""

    name: str
    path: Path
    history: Sequence[Mapping[str, float]]
    samples: Sequence[Mapping[str, Any]] = ()
    config: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] | None = None
    finished: bool = False
    notes: Sequence[str] = field(default=())

    @property
    def last_step(self) -> int:
        """The last step with metrics."""
        return int(self.history[-1]["step"])


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs in `paths`, without duplicates, under distinct names."""
    unique = list({path.resolve(): path for path in paths})
    if not unique:
        raise UserError("no run given: give at least one output_dir of `rlframework train`")
    return [read_run(path, name) for path, name in zip(unique, names_of(unique), strict=True)]


def read_run(path: Path, name: str) -> Run:
    """Read the run in folder `path`, called `name` on the page."""
    _check_folder(path)
    history = read_history(path / METRICS_FILE)
    if not history:
        raise UserError(f"{path} has no metrics yet: its {METRICS_FILE} is empty. Try again after the first step")
    if not all(math.isfinite(row["step"]) for row in history):
        raise DataError(f"{path / METRICS_FILE} contains a non-finite step; the file may be damaged")
    notes: list[str] = []
    samples = _read_samples(path / SAMPLES_FILE, notes)
    config = _read_mapping(path / CONFIG_FILE)
    environment = _read_mapping(path / ENVIRONMENT_FILE)
    return Run(name, path, history, samples, config, environment, (path / MODEL).is_dir(), notes)


def names_of(paths: Sequence[Path]) -> list[str]:
    """Distinct names for `paths`: their shortest suffixes, all with the same number of parts."""
    longest = max(len(path.parts) for path in paths)
    for count in range(1, longest):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(paths):
            return names
    return [str(path) for path in paths]


def _check_folder(path: Path) -> None:
    if not path.exists():
        raise UserError(f"{path} does not exist: give the output_dir of a run")
    if not path.is_dir():
        raise UserError(f"{path} is a file: give the output_dir of a run")
    if (path / METRICS_FILE).exists():
        return
    if (path / CONFIG_FILE).exists():
        raise UserError(
            f"{path} has no metrics yet: it contains no {METRICS_FILE}. Try again after the first step; a run with "
            "observers.jsonl=false never writes this file"
        )
    below = sorted(file.parent for level in (1, 2) for file in path.glob("*/" * level + METRICS_FILE))
    if below:
        given = " ".join(str(folder) for folder in below[:6]) + (" ..." if len(below) > 6 else "")
        raise UserError(f"{path} is not a run, but contains {len(below)} run(s): give those instead:\n  {given}")
    raise UserError(
        f"{path} is not a run: it contains no {METRICS_FILE}. Give the output_dir of a run of `rlframework train`"
    )


def _read_samples(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Read the samples in the order of their steps. Invalid lines are skipped, and their number is added to `notes`.

    As with metrics, rows written after a resume replace earlier rows of the same and later steps.
    """
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    bad = 0
    for line in _read_text(path).split("\n")[:-1]:
        row = _sample(line)
        if row is None:
            bad += 1
            continue
        if rows and rows[-1]["step"] > row["step"]:
            while rows and rows[-1]["step"] >= row["step"]:
                rows.pop()
        rows.append(row)
    if bad:
        notes.append(f"{bad} lines of {path.name} could not be read and were skipped")
    return rows


def _sample(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        reward = row.get("reward")
        reward = float(reward) if reward is not None else None
        texts = {name: row[name] if isinstance(row[name], str) else json.dumps(row[name])
                 for name in ("prompt", "completion")}  # fmt: skip
        return {**row, **texts, "reward": reward, "step": int(row["step"]), "kind": str(row.get("kind", "train"))}
    except (ValueError, AttributeError, TypeError, KeyError, OverflowError):
        return None


def _read_mapping(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    import yaml

    try:
        values = yaml.safe_load(_read_text(path))  # JSON too
    except yaml.YAMLError as error:
        raise DataError(f"{path} is not valid: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path} must contain a mapping, not {type(values).__name__}; the file may be damaged")
    return values


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
