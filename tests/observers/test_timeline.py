"""The timeline of a run: what is recorded, and what the report makes of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlframework.observers.jsonl import JsonlObserver
from rlframework.observers.runs import read_run
from rlframework.observers.timeline import Timeline, timeline_row
from rlframework.plugins.hookspec import TimeSpan
from rlframework_report.report import render
from rlframework_report.report.content import content
from rlframework_report.report.timeline import hint, timeline_of

ROWS: list[dict[str, Any]] = [
    {
        "step": 1, "start": 1000.0, "seconds": 4.0,
        "lanes": {"engine 0": [["generate", 0.5, 3.5]], "engine 1": [["generate", 0.5, 1.5]],
                  "refits": [["refit", 0.0, 0.5]], "trainer": [["generate", 0.5, 2.0], ["train", 2.0, 4.0]]},
        "busy": {"engine 0": 3.0, "engine 1": 1.0, "refits": 0.5, "trainer": 3.5},
    },
    {
        "step": 2, "start": 1004.0, "seconds": 6.0,
        "lanes": {"engine 0": [["generate", -0.5, 4.5]], "refits": [["refit", 1.0, 1.5]],
                  "trainer": [["checkpoint", 0.0, 1.0], ["generate", 1.5, 2.0], ["train", 2.0, 6.0]]},
        "busy": {"engine 0": 4.0, "refits": 0.5, "trainer": 5.5},
    },
]  # fmt: skip
"""10 seconds: the trainer trains for 6, waits for 2 and writes for 1; engine 0 is busy for 7, engine 1 for 1."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    metrics = [{"step": row["step"], "async/staleness_max": 1.0, "time/step": 4.0} for row in ROWS]
    for name, rows in (("metrics", metrics), ("timeline", ROWS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_last_steps_are_drawn_one_after_the_other(folder: Path) -> None:
    found = timeline_of(read_run(folder, "r"))
    assert found == {
        "steps": [(1, 0.0), (2, 4.0)],
        "seconds": 10.0,
        "activities": ["wait", "train", "checkpoint", "generate", "refit"],
        "lanes": [
            {"name": "trainer", "busy": 0.7, "spans": [
                (0, 0.5, 2.0), (1, 2.0, 4.0), (2, 4.0, 5.0), (0, 5.5, 6.0), (1, 6.0, 10.0)]},
            {"name": "engine 0", "busy": 0.7, "spans": [(3, 0.5, 3.5), (3, 3.5, 8.5)]},
            {"name": "engine 1", "busy": 0.1, "spans": [(3, 0.5, 1.5)]},
            {"name": "refits", "busy": 0.1, "spans": [(4, 0.0, 0.5), (4, 5.0, 5.5)]},
        ],
        "shares": [("wait", 0.2), ("train", 0.6), ("checkpoint", 0.1)],
        "hidden": 0,
        "hint": hint(0.2, 0.6, True),
    }  # fmt: skip


def test_engines_in_the_trainer_s_process_are_no_wait(folder: Path) -> None:
    rows = [{**row, "lanes": {name: spans for name, spans in row["lanes"].items() if name != "refits"}} for row in ROWS]
    (folder / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = timeline_of(read_run(folder, "r"))
    assert found is not None
    assert found["shares"][0] == ("generate", 0.2)
    assert found["hint"] == ""
    (folder / "timeline.jsonl").unlink()
    assert timeline_of(read_run(folder, "r")) is None


@pytest.mark.parametrize(
    ("waits", "idle", "asynchronous", "words"),
    [
        (0.6, 0.4, False, "The trainer waits in 60% of the time, and the engines are idle in 40%. They take turns"),
        (0.3, 0.3, True, "a larger algorithm.async.max_staleness"),
        (0.3, 0.0, True, "More engines would help"),
        (0.0, 0.3, True, "More workers of the trainer would help"),
        (0.05, 0.05, True, "Both are busy"),
    ],
)
def test_the_hint_names_what_the_run_waits_for(waits: float, idle: float, asynchronous: bool, words: str) -> None:
    assert words in hint(waits, idle, asynchronous)


def test_spans_with_next_to_no_time_between_them_are_joined_but_not_counted() -> None:
    """A step of 10 s: gaps of up to 0.05 s are left out."""
    spans = [
        TimeSpan("engine 0", "generate", 103.04, 104.0),
        TimeSpan("engine 0", "generate", 99.0, 103.0),
        TimeSpan("engine 0", "generate", 104.06, 105.0),
        TimeSpan("trainer", "train", 101.0, 103.0),
        TimeSpan("trainer", "checkpoint", 103.0, 103.0001),
        TimeSpan("environment", "step", 102.0, 104.0),  # of several episodes at the same time
        TimeSpan("environment", "step", 102.5, 103.0),
        TimeSpan("environment", "score", 103.0, 106.0),
    ]
    assert timeline_row(3, spans, 100.0, 110.0) == {
        "step": 3,
        "start": 100.0,
        "seconds": 10.0,
        "lanes": {
            "engine 0": [("generate", -1.0, 4.0), ("generate", 4.06, 5.0)],
            "environment": [("step", 2.0, 4.0), ("score", 4.0, 6.0)],
            "trainer": [("train", 1.0, 3.0)],
        },
        "busy": {"engine 0": 5.9, "environment": 4.0, "trainer": 2.0},
    }


def test_of_many_engines_the_first_have_lanes_and_all_are_summed_up(tmp_path: Path) -> None:
    """1,000 engines; engine n is busy for 1 + n milliseconds of 2 seconds."""
    spans = [TimeSpan(f"engine {n}", "generate", 100.0, 100.001 + n / 1000) for n in reversed(range(1000))]
    spans.append(TimeSpan("trainer", "generate", 100.0, 101.0))
    spans.append(TimeSpan("refits", "refit", 101.5, 102.0))
    row = timeline_row(1, spans, 100.0, 102.0)
    assert set(row["lanes"]) == set(row["busy"]) == {*(f"engine {n}" for n in range(16)), "trainer", "refits"}
    assert row["engines"] == {
        "count": 1000, "busy": 500.5, "min": 0.001, "median": pytest.approx(0.5005, abs=6e-4), "max": 1.0,
        "busiest": {"engine 999": 1.0, "engine 998": 0.999, "engine 997": 0.998},
    }  # fmt: skip
    assert len(json.dumps(row)) < 2000
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step": 2.0}\n')
    (tmp_path / "timeline.jsonl").write_text(json.dumps(row) + "\n")
    found = timeline_of(read_run(tmp_path, "r"))
    assert found is not None
    assert found["hidden"] == 984
    assert found["hint"] == hint(0.5, 1.0 - 500.5 / 2.0 / 1000, False)


def test_spans_are_written_with_the_step_in_which_they_end(tmp_path: Path) -> None:
    timeline, now = Timeline(), time.perf_counter()
    timeline.add("trainer", "train", now, now + 2.0)
    spans = timeline.pop()
    assert abs(spans[0].start - time.time()) < 60  # seconds since 1970
    assert spans[0].end - spans[0].start == pytest.approx(2.0, abs=1e-5)
    assert timeline.pop() == []
    observer = JsonlObserver()
    run: Any = SimpleNamespace(output_dir=tmp_path, config=SimpleNamespace(observers=SimpleNamespace(samples=0)))
    observer.rlframework_run_started(run)
    observer.rlframework_step_finished(1, {}, [], spans)
    observer.rlframework_step_finished(2, {}, [], [])
    observer.close()
    first, second = map(json.loads, (tmp_path / "timeline.jsonl").read_text().splitlines())
    assert first["lanes"]["trainer"][0][0] == "train"
    assert first["start"] + first["seconds"] == pytest.approx(second["start"], abs=0.0021)  # rows follow each other
    assert second["lanes"] == {}


def test_a_damaged_line_is_skipped_and_counted(folder: Path) -> None:
    with (folder / "timeline.jsonl").open("a") as file:
        file.write('{"step": 3}\n')
    run = read_run(folder, "r")
    assert [row.step for row in run.timeline] == [1, 2]
    assert run.notes == ["1 lines of timeline.jsonl could not be read and were skipped"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
def test_the_script_draws_a_lane_for_each_part(folder: Path, tmp_path: Path) -> None:
    """With a document that only keeps what is made: the rectangles of each lane lie where the seconds say.

    An activity has the colour that it has among the phases, and the names of lanes have room.
    """
    data = content([read_run(folder, "r")], 1)
    assert "function timelinePlot" in render(data)
    run = data["runs"][0]
    run["phases"] = {"names": ["train", "generate", "other"]}
    run["timeline"]["lanes"][-1]["name"] = "environment"
    assets = Path(__file__).parents[2] / "plugins/report/rlframework_report/report/assets"
    program = (
        "const make = (tag) => ({ tag, at: {}, nodes: [], setAttribute(k, v) { this.at[k] = v; },"
        " addEventListener() {}, append(...n) { this.nodes.push(...n); } });"
        "globalThis.innerWidth = 1000; globalThis.document = { createElement: make, createElementNS: (_, t) => make(t),"
        f" getElementById: () => ({{ textContent: {json.dumps(json.dumps(data))} }}) }};"
        + (assets / "base.js").read_text()
        + (assets / "timeline.js").read_text()
        + "const { activities } = data.runs[0].timeline;"
        "const plot = timelinePlot(data.runs[0], (n) => paintOf(activities[n]));"
        "const drawn = plot.nodes.filter((n) => n.tag === 'rect').map(({ at }) => [at.x, at.y, at.width, at.class]);"
        "console.log(JSON.stringify(drawn));"
    )
    drawn = json.loads(subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True).stdout)
    spans = [(lane, span) for lane, each in enumerate(run["timeline"]["lanes"]) for span in each["spans"]]
    # 720 wide, of which 44 and 14 + 6.5 for each letter of "environment" are margins, for 10 seconds
    expected = [(85.5 + 59.05 * start, 18 + 26 * lane, 59.05 * (end - start)) for lane, (_, start, end) in spans]
    assert [tuple(map(float, each[:3])) for each in drawn] == [pytest.approx(each, abs=0.01) for each in expected]
    colours = {run["timeline"]["activities"][span[0]]: each[3] for (_, span), each in zip(spans, drawn, strict=True)}
    assert colours == {
        "wait": "phase c-rest", "train": "phase p0", "generate": "phase p1", "checkpoint": "phase p2",
        "refit": "phase p3",
    }  # fmt: skip
