"""Reads a run's directory: metrics, samples, timeline, configuration, environment.

Only `metrics.jsonl` is required. An incomplete last line, left by a killed run, is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlframework.base.errors import ConfigError, DataError, UserError
from rlframework.config.yaml_text import read_yaml
from rlframework.observers.jsonl import (
    METRICS_FILE,
    SAMPLES_FILE,
    TIMELINE_FILE,
    History,
    read_history,
    series,
)
from rlframework.observers.run_environment import ENVIRONMENT_FILE, Resumed
from rlframework.observers.timeline import ENGINE

CONFIG_FILE, MODEL = "config.yaml", "model"
R = TypeVar("R", "Sample", "TimelineRow")


class Turn(BaseModel):
    """A message of an episode, see `SampleRecord.turns`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str
    content: Any = ""
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] = []
    reward: float | None = None
    trained: bool = False
    sampled: bool | None = None
    row: int | None = None


class Sample(BaseModel):
    """A line of `samples.jsonl`; `model_extra` has its other fields."""

    model_config = ConfigDict(extra="allow", frozen=True)

    step: int
    kind: str = "train"
    prompt: str
    completion: str
    reward: float | None = None
    run: str | None = None
    turns: tuple[Turn, ...] = ()
    images: tuple[str, ...] = ()
    model_input: str = ""
    metrics: dict[str, float] = {}


Seconds = Annotated[float, Field(ge=-1e9, le=1e9)]
"""Of a step: what is beyond 30 years is damage."""


class EngineSummary(BaseModel):
    """How busy many engines were, see `timeline_row`: their number, and their seconds together."""

    model_config = ConfigDict(frozen=True)

    count: int
    busy: Seconds


class TimelineRow(BaseModel):
    """A line of `timeline.jsonl`, see `timeline_row`."""

    model_config = ConfigDict(frozen=True)

    step: int
    seconds: Seconds
    lanes: dict[str, list[tuple[str, Seconds, Seconds]]]
    busy: dict[str, Seconds]
    engines: EngineSummary | None = None

    @property
    def engine_seconds(self) -> float:
        """The seconds in which engines had requests, a sum over all of them."""
        if self.engines is not None:
            return self.engines.busy
        return sum(seconds for lane, seconds in self.busy.items() if lane.startswith(ENGINE))


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
    notes: Sequence[str] = ()
    timeline: Sequence[TimelineRow] = ()

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


def read_run(path: Path, name: str) -> Run:
    """Read the run in folder `path`, called `name` on the page."""
    _check_folder(path)
    history = read_history(path / METRICS_FILE)
    if not history:
        raise UserError(f"{path} has no metrics yet: its {METRICS_FILE} is empty. Try again after the first step")
    if not all(math.isfinite(row["step"]) for row in history):
        raise DataError(f"{path / METRICS_FILE} contains a non-finite step; the file may be damaged")
    samples, bad_samples = _read_rows(path / SAMPLES_FILE, Sample)
    timeline, bad_timeline = _read_rows(path / TIMELINE_FILE, TimelineRow)
    skipped = {SAMPLES_FILE: bad_samples, TIMELINE_FILE: bad_timeline}
    notes = [f"{bad} lines of {name} could not be read and were skipped" for name, bad in skipped.items() if bad]
    config, environment = _read_mapping(path / CONFIG_FILE), _read_mapping(path / ENVIRONMENT_FILE)
    notes += _changes(environment or {})
    return Run(name, path, history, samples, config, environment, (path / MODEL).is_dir(), notes, timeline)


def _changes(environment: Mapping[str, Any]) -> list[str]:
    """A sentence for each resume that changed settings."""
    notes = []
    for started in (*environment.get("earlier", ()), environment):
        with suppress(ValidationError, AttributeError):  # it was not resumed, or the file is not ours
            resumed = Resumed.model_validate(started.get("resumed"))
            notes += [str(resumed)] * bool(resumed.changed)
    return notes


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise UserError(f"{path} {'is a file' if path.exists() else 'does not exist'}: give the output_dir of a run")
    if (path / METRICS_FILE).exists():
        return
    if (path / CONFIG_FILE).exists():
        raise UserError(
            f"{path} has no metrics yet: it contains no {METRICS_FILE}. Try again after the first step; a run with "
            "observers.jsonl=false never writes this file"
        )
    files = [*path.glob(f"*/{METRICS_FILE}"), *path.glob(f"*/*/{METRICS_FILE}")]
    below = " ".join(sorted(str(file.parent) for file in files)[:6])
    remedy = f"give the runs in it instead: {below}" if below else "give the output_dir of a run of `rlframework train`"
    raise UserError(f"{path} is not a run, as it contains no {METRICS_FILE}; {remedy}")


def _read_rows(path: Path, kind: type[R]) -> tuple[list[R], int]:
    """Read lines of a `kind` in the order of their steps; also return the number of invalid lines, which are skipped.

    As with metrics, rows written after a resume replace earlier rows of the same and later steps.
    """
    rows: list[R] = []
    bad = 0
    for line in _content(path).split(b"\n")[:-1] if path.exists() else ():
        try:
            row = kind.model_validate_json(line)
        except ValidationError:
            bad += 1
            continue
        if rows and rows[-1].step > row.step:
            rows = [earlier for earlier in rows if earlier.step < row.step]
        rows.append(row)
    return rows, bad


def _read_mapping(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return dict(read_yaml(path).values)  # JSON too
    except ConfigError as error:
        raise DataError(f"{' '.join(str(error).split())[:300]}; the file may be damaged") from error


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
