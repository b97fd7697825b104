"""Writes `metrics.jsonl` and `samples.jsonl` in the run's directory, and reads the former.

Each line is valid JSON: non-finite numbers are written as the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from rlframework.errors import DataError
from rlframework.observers.environment import run_id
from rlframework.plugins.hookspec import RunInfo, hookimpl

if TYPE_CHECKING:
    from rlframework.plugins.hookspec import SampleRecord

METRICS_FILE, SAMPLES_FILE = "metrics.jsonl", "samples.jsonl"


class JsonlObserver:
    """Appends one object per step to `metrics.jsonl`, and the step's samples to `samples.jsonl`."""

    def __init__(self) -> None:
        self._metrics: TextIO | None = None
        self._samples: TextIO | None = None
        self._run_id = ""

    @hookimpl
    def rlframework_run_started(self, run: RunInfo) -> None:
        """Open both files for appending after their last complete line."""
        run.output_dir.mkdir(parents=True, exist_ok=True)
        self._run_id = run_id(run.output_dir)
        self._metrics = _open_for_append(run.output_dir / METRICS_FILE)
        if run.config.observers.samples:
            self._samples = _open_for_append(run.output_dir / SAMPLES_FILE)

    @hookimpl
    def rlframework_step_finished(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRecord]
    ) -> None:
        """Write and flush the step's line, with `time` in seconds since 1970, and its samples with the run's id."""
        _write(self._metrics, [{"step": step, "time": round(time.time(), 3), **metrics}])
        _write(self._samples, [{"run": self._run_id, **asdict(sample)} for sample in samples])

    def close(self) -> None:
        """Close both files."""
        for file in (self._metrics, self._samples):
            if file is not None:
                file.close()


def read_history(path: Path) -> list[dict[str, float]]:
    """The rows of a `metrics.jsonl`, in the order of their steps.

    Rows written after a resume replace earlier rows of the same and later steps; two consecutive rows of one step
    (training and validation) are merged. An incomplete last line is ignored; any other invalid line raises `DataError`
    with its number.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {path}: it is not UTF-8 text ({error})") from error
    rows: list[dict[str, float]] = []
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        row = _parse(path, number, line)
        while rows and rows[-1]["step"] > row["step"]:
            rows.pop()
        if rows and rows[-1]["step"] == row["step"]:
            rows[-1].update(row)
        else:
            rows.append(row)
    return rows


def drop_steps_after(output_dir: Path, step: int) -> None:
    """Truncate `metrics.jsonl` and `samples.jsonl` after step `step`; a negative `step` empties them.

    For a run that resumes from `step` and repeats the later steps. The files must not be open.
    """
    for path in (output_dir / METRICS_FILE, output_dir / SAMPLES_FILE):
        if path.is_file():
            with path.open("rb+") as file:
                file.truncate(_end_of_step(file, step))


def _end_of_step(lines: BinaryIO, step: int) -> int:
    """The offset at which the last complete line with a step of at most `step` ends."""
    end = position = 0
    for line in lines:
        position += len(line)
        if line.endswith(b"\n") and json.loads(line)["step"] <= step:
            end = position
    return end


def _parse(path: Path, number: int, line: str) -> dict[str, float]:
    try:
        row = {name: float(value) for name, value in json.loads(line).items()}
        row["step"]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise DataError(f"{path}, line {number}: not an object of numbers with a `step`: {line[:80]!r}") from error
    return row


def _open_for_append(path: Path) -> TextIO:
    """Open for appending, after removing an incomplete last line left by a killed process."""
    with path.open("ab+") as file:
        end = size = file.tell()
        while end and not _ends_line(file, end):
            end -= 1
        if end != size:
            file.truncate(end)
    return path.open("a", encoding="utf-8")


def _ends_line(file: Any, position: int) -> bool:
    file.seek(position - 1)
    return bool(file.read(1) == b"\n")


def _write(file: TextIO | None, rows: Sequence[Mapping[str, Any]]) -> None:
    if file is None or not rows:
        return
    file.writelines(json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    file.flush()


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _json_number(value) if isinstance(value, float) else value for name, value in row.items()}


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
