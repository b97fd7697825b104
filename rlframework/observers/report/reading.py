"""Reads a run's directory for the report: metrics, samples, configuration, environment.

Only `metrics.jsonl` is required. An incomplete last line, left by a killed run, is ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rlframework.errors import DataError, UserError
from rlframework.observers.environment import ENVIRONMENT_FILE
from rlframework.observers.jsonl import METRICS_FILE, SAMPLES_FILE, History, read_history, read_text, series

CONFIG_FILE, MODEL = "config.yaml", "model"
SAMPLE_FIELDS = ("run", "step", "kind", "prompt", "completion", "reward")


@dataclass(frozen=True)
class Sample:
    """A line of `samples.jsonl`; `extra` has its other fields."""

    step: int
    kind: str
    prompt: str
    completion: str
    reward: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: str) -> Sample | None:
        """The sample in a line of JSON; None if the line is invalid."""
        try:
            row = json.loads(line)
            extra = {name: value for name, value in row.items() if name not in SAMPLE_FIELDS}
            prompt, completion = (
                text if isinstance(text, str) else json.dumps(text) for text in (row["prompt"], row["completion"])
            )
            reward = None if row.get("reward") is None else float(row["reward"])
            return cls(int(row["step"]), str(row.get("kind", "train")), prompt, completion, reward, extra)
        except (ValueError, AttributeError, TypeError, KeyError, OverflowError):
            return None


@dataclass(frozen=True)
class Run:
    """The data of one run. `config` and `environment` are None if the run has no such file."""

    name: str
    path: Path
    history: History
    samples: Sequence[Sample] = ()
    config: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] | None = None
    finished: bool = False
    notes: Sequence[str] = field(default=())

    @property
    def last_step(self) -> int:
        """The last step with metrics."""
        return int(self.history[-1]["step"])

    @cached_property
    def steps(self) -> list[float]:
        """The step of each row of the history."""
        return [float(row["step"]) for row in self.history]

    @cached_property
    def names(self) -> list[str]:
        """The names of all metrics, in the order of their appearance."""
        return list(dict.fromkeys(name for row in self.history for name in row))

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and finite values of a metric."""
        return series(self.history, name, self.steps)


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
    samples, bad = _read_samples(path / SAMPLES_FILE)
    notes = [f"{bad} lines of {SAMPLES_FILE} could not be read and were skipped"] if bad else []
    config, environment = _read_mapping(path / CONFIG_FILE), _read_mapping(path / ENVIRONMENT_FILE)
    return Run(name, path, history, samples, config, environment, (path / MODEL).is_dir(), notes)


def names_of(paths: Sequence[Path]) -> list[str]:
    """Distinct names for `paths`: their shortest suffixes, all with the same number of parts."""
    for count in range(1, max(len(path.parts) for path in paths)):
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


def _read_samples(path: Path) -> tuple[list[Sample], int]:
    """Read the samples in the order of their steps; also return the number of invalid lines, which are skipped.

    As with metrics, rows written after a resume replace earlier rows of the same and later steps.
    """
    rows: list[Sample] = []
    parsed = [Sample.parse(line) for line in read_text(path, "replace").split("\n")[:-1]] if path.exists() else []
    for row in filter(None, parsed):
        if rows and rows[-1].step > row.step:
            rows = [earlier for earlier in rows if earlier.step < row.step]
        rows.append(row)
    return rows, parsed.count(None)


def _read_mapping(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        values = yaml.safe_load(read_text(path, "replace"))  # JSON too
    except yaml.YAMLError as error:
        raise DataError(f"{path} is not valid: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path} must contain a mapping, not {type(values).__name__}; the file may be damaged")
    return values
