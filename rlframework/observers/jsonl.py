"""`metrics.jsonl`, `samples.jsonl` and its images, and `timeline.jsonl` in the run's directory; series of metrics.

Each line is valid JSON: non-finite numbers are written as the strings "NaN", "Infinity" and "-Infinity". A history has
one mapping per step, from metric name to value, with the step as `step` if it is known.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from rlframework.base.errors import DataError
from rlframework.base.files import AppendedFile, write_atomically, writing
from rlframework.base.logs import printable
from rlframework.interfaces.messages import Picture
from rlframework.observers.run_environment import run_id
from rlframework.observers.timeline import timeline_row
from rlframework.plugins.hookspec import RunInfo, SampleRecord, TimeSpan, hookimpl

FOLDER = "sample_images"
"""The folder of a run's directory that has the copies."""
SIDE = 128
"""Maximum width and height of a copy in pixels."""
_QUALITY = 85


def store_image(output_dir: Path, picture: Picture) -> str:
    """Store a small copy of `picture` unless the run has one; return its file's name, which is a digest."""
    name = f"{picture.digest}.jpg"
    path = output_dir / FOLDER / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        from rlframework.datasets.pictures import decoded

        small, file = decoded(picture), BytesIO()
        small.thumbnail((SIDE, SIDE))
        small.save(file, "JPEG", quality=_QUALITY, subsampling=0)
        write_atomically(path, file.getvalue())
    return name


METRICS_FILE, SAMPLES_FILE, TIMELINE_FILE = "metrics.jsonl", "samples.jsonl", "timeline.jsonl"

_ALWAYS = ("prompt", "completion", "reward", "step", "kind")
"""Fields that every sample has in the file; others are left out where they are empty."""

History = Sequence[Mapping[str, float]]


class JsonlObserver:
    """Appends one object per step to `metrics.jsonl` and `timeline.jsonl`, and its samples to `samples.jsonl`."""

    def __init__(self) -> None:
        self._files: dict[str, AppendedFile] = {}

    @hookimpl
    def rlframework_run_started(self, run: RunInfo) -> None:
        """Open the files for appending after their last complete line."""
        self._run_id, self._output_dir, self._since = run_id(run.output_dir), run.output_dir, time.time()
        samples = (SAMPLES_FILE,) if run.config.observers.samples else ()
        for name in (METRICS_FILE, TIMELINE_FILE, *samples):
            self._files[name] = AppendedFile(run.output_dir / name)
            with (run.output_dir / name).open("rb+") as file:  # a killed process leaves an incomplete last line
                file.truncate(file.read().rfind(b"\n") + 1)

    @hookimpl
    def rlframework_step_finished(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRecord], timeline: Sequence[TimeSpan]
    ) -> None:
        """Write the step's lines, with `time` in seconds since 1970, and its samples with the run's id."""
        since, self._since = self._since, time.time()
        rows: dict[str, list[dict[str, Any]]] = {
            METRICS_FILE: [{"step": step, "time": round(self._since, 3), **metrics}],
            TIMELINE_FILE: [timeline_row(step, timeline, since, self._since)],
            SAMPLES_FILE: [{"run": self._run_id, **self._fields(sample)} for sample in samples],
        }
        for name, file in self._files.items():
            lines = (json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) for row in rows[name])
            file.write("".join(printable(line) + "\n" for line in lines).encode(errors="backslashreplace"))

    def close(self, state: str = "finished") -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _fields(self, sample: SampleRecord) -> dict[str, Any]:
        """The fields of `sample` without empty ones that not all samples have; images as `store_image`."""
        turns = [{**turn, "content": self._content(turn["content"])} for turn in sample.turns]
        row = asdict(replace(sample, images=(), turns=turns))  # which would copy images
        row["images"] = [store_image(self._output_dir, picture) for picture in sample.images]
        return {name: value for name, value in row.items() if name in _ALWAYS or value}

    def _content(self, content: Any) -> Any:
        """The content of a message with its images as `store_image`."""
        if isinstance(content, str):
            return content
        return [
            {**part, "image": store_image(self._output_dir, part["image"])} if part["type"] == "image" else part
            for part in content
        ]


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Replace non-finite numbers by their names."""
    bad = {name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: json.dumps(value) if name in bad else value for name, value in row.items()}


def read_history(path: Path) -> list[dict[str, float]]:
    """The rows of a `metrics.jsonl`, in the order of their steps (see `add_row`).

    An incomplete last line is ignored; any other invalid line raises `DataError` with its number.
    """
    try:
        lines = path.read_bytes().decode().split("\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {path}: it is not UTF-8 text ({error})") from error
    rows: list[dict[str, float]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            add_row(rows, {name: float(value) for name, value in json.loads(line).items()})
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise DataError(f"{path}, line {number}: not an object of numbers with a `step`: {line[:80]!r}") from error
    return rows


def add_row(rows: list[dict[str, float]], row: dict[str, float]) -> None:
    """Append `row`, which replaces rows of later steps, written before a resume, and extends a row of the same step.

    Training and validation of one step are two rows.
    """
    step = row["step"]
    while rows and rows[-1]["step"] > step:
        rows.pop()
    if rows and rows[-1]["step"] == step:
        rows[-1].update(row)
    else:
        rows.append(row)


def drop_steps_after(output_dir: Path, step: int) -> None:
    """Truncate the files of `JsonlObserver` after step `step`; a negative `step` empties them.

    For a run that resumes from `step` and repeats the later steps. The files must not be open. A damaged line does not
    count.
    """
    for path in (output_dir / name for name in (METRICS_FILE, SAMPLES_FILE, TIMELINE_FILE)):
        if path.is_file():
            with writing(path), path.open("rb+") as file:
                end = position = 0
                for line in file:
                    position += len(line)
                    if line.endswith(b"\n") and _step_of(line) <= step:
                        end = position
                file.truncate(end)


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, LookupError):
        return math.inf


def series(history: History, name: str, at: Sequence[float]) -> tuple[list[float], list[float]]:
    """Positions and values of metric `name`, skipping missing and non-finite values; `at[i]` is row `i`'s position."""
    points = [
        (position, float(row[name]))
        for position, row in zip(at, history, strict=True)
        if name in row and math.isfinite(row[name])
    ]
    return [position for position, _ in points], [value for _, value in points]
