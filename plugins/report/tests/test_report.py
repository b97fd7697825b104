"""The report page: reading runs, thinning their data, and keeping text from runs inert."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_runs import call

from rlframework.base.errors import UserError
from rlframework.observers.runs import Run, Sample, read_run
from rlframework_report.report import figures, render, write_report
from rlframework_report.report.charts import arrange
from rlframework_report.report.content import breakdowns_of, content, phases_of, thin
from rlframework_report.report.figures import draw_figures
from rlframework_report.report.runs import facts_of, headlines, names_of, read_runs, settings_of, thin_samples

CONFIG = """
seed: 3
algorithm: {name: grpo, num_steps: 4}
policy: {model_name: m/tiny, backend: dtensor, optimizer: {lr: 0.5}}
worker_group: {name: inline, num_workers: 1}
environment: {name: addition}
"""
ROWS: list[dict[str, Any]] = [
    {"step": 0, "time": 1000.0, "validation/accuracy": 0.25},
    {"step": 1, "time": 1002.0, "train/reward": 0.5, "train/loss": 2.0, "time/generate": 1.0, "time/step": 2.0},
    {"step": 2, "time": 1006.0, "train/reward": 1.5, "train/loss": "NaN", "time/generate": 3.0, "time/step": 4.0,
     "validation/accuracy": 0.75},
    {"step": 3, "time": 1008.0, "train/reward": 1.0, "train/loss": 1.0, "time/generate": 1.0, "time/step": 2.0,
     "validation/accuracy": 0.5},
]  # fmt: skip


def sample(step: int, completion: str, kind: str = "train", prompt: str = "1+1=", **more: Any) -> dict[str, Any]:
    return {"step": step, "kind": kind, "prompt": prompt, "completion": completion, "reward": 1.0, **more}


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(lines(ROWS))
    (folder / "samples.jsonl").write_text(lines([sample(1, "2"), sample(2, "3", "validation", run="xyz", failed="no")]))
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


@pytest.mark.slow
def test_the_command_writes_the_page_and_pictures(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("report", str(run_dir)) == 0
    assert capsys.readouterr().out.startswith(f"wrote {run_dir / 'report.html'} (")
    data = data_of((run_dir / "report.html").read_text())
    assert data["title"] == "a"
    [run] = data["runs"]
    assert run["series"]["train/reward"] == [run["places"].index([1, 2, 3]), [0.5, 1.5, 1]]
    assert run["bad"] == {"train/loss": [2]}
    assert run["samples"]["rows"] == [[1, "train", 0, "2", 1.0, {}], [2, "validation", 0, "3", 1.0, {"failed": "no"}]]
    pictures = sorted(file.name for file in (run_dir / "report-figures").iterdir())
    assert pictures == ["optimisation.png", "outcome.png", "phases.png", "speed.png"]
    assert (run_dir / "report-figures" / "outcome.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_report_of_several_runs_is_written_where_the_options_say(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "runs" / "b"
    other.mkdir()
    (other / "metrics.jsonl").write_text(lines(ROWS[:2]))
    page, pictures = tmp_path / "new" / "p.html", tmp_path / "png"
    given = [str(run_dir), str(other), str(run_dir), "--out", str(page), "--png", str(pictures), "--smooth", "7"]
    assert call("report", *given) == 0
    data = data_of(page.read_text())
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert data["smooth"] == 7
    assert data["runs"][1]["config"] is None
    assert (pictures / "outcome.png").exists()


def test_the_summary_shows_settings_and_progress_of_the_run(run_dir: Path) -> None:
    run = read_run(run_dir, "a")
    assert dict(facts_of(run)) == {
        "algorithm": "grpo", "environment": "addition", "model": "m/tiny", "backend": "dtensor",
        "workers": "1 (inline)", "seed": "3", "steps": "3 of 4",
        "held-out accuracy": "best 75.0% at step 2, last 50.0% at step 3",
        "training time": "8s",
    }  # fmt: skip
    assert headlines(run)[0]["state"] == "not finished, at step 3"
    (run_dir / "model").mkdir()
    assert headlines(read_run(run_dir, "a"))[0]["state"] == "finished"


def test_an_incomplete_last_line_is_ignored(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/rew')
    with (run_dir / "samples.jsonl").open("a") as file:
        file.write('{"nothing": 1}\nnot json\n{"step": 4, "prom')
    run = read_run(run_dir, "a")
    assert run.last_step == 3
    assert [row.completion for row in run.samples] == ["2", "3"]
    assert run.notes == ["2 lines of samples.jsonl could not be read and were skipped"]


def test_settings_that_a_resume_changed_are_noted(run_dir: Path) -> None:
    first, last = (
        {"started": "now", "resumed": {"after_step": step, "changed": changed}}
        for step, changed in ((1, {"policy.optimizer.lr": [0.5, 0.1], "seed": [None, 3]}), (2, {}))
    )
    (run_dir / "environment.json").write_text(json.dumps({**last, "earlier": [{"started": "then"}, first, "?"]}))
    assert read_run(run_dir, "a").notes == ["resumed after step 1 with policy.optimizer.lr 0.5 -> 0.1, seed null -> 3"]


def test_samples_of_a_run_resumed_from_an_earlier_step(run_dir: Path) -> None:
    rows = [sample(1, "a"), sample(2, "b"), sample(2, "c"), sample(3, "d"), sample(2, "e"), sample(2, "f")]
    (run_dir / "samples.jsonl").write_text(lines(rows))
    assert [row.completion for row in read_run(run_dir, "a").samples] == ["a", "e", "f"]


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (lambda folder: folder / "gone", "does not exist"),
        (lambda folder: folder.parent, "metrics.jsonl; give the runs in it instead: "),
        (lambda folder: [(folder / "metrics.jsonl").write_text("")] and folder, "no metrics yet"),
        (
            lambda folder: [(folder / name).unlink() for name in ("metrics.jsonl", "config.yaml")] and folder,
            "is not a run",
        ),
        (lambda folder: [(folder / "metrics.jsonl").write_bytes(b"\xff\xfe\n")] and folder, "UTF-8"),
        (lambda folder: [(folder / "metrics.jsonl").write_text("nonsense\n")] and folder, "line 1"),
        (
            lambda folder: [(folder / "samples.jsonl").unlink(), (folder / "samples.jsonl").mkdir()] and folder,
            "cannot read",
        ),
        (lambda folder: [(folder / "config.yaml").write_text("a: [")] and folder, "not valid YAML"),
    ],
)
def test_invalid_folders_are_rejected_and_nothing_is_written(
    run_dir: Path, prepare: Any, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = run_dir.parent / "page.html"
    assert call("report", str(prepare(run_dir)), "--out", str(page)) == 2
    assert told in capsys.readouterr().err
    assert not page.exists()


def test_a_page_only_overwrites_a_page(run_dir: Path) -> None:
    with pytest.raises(UserError, match=r"must end in \.html"):
        write_report([run_dir], run_dir / "metrics.jsonl")
    with pytest.raises(UserError, match="span must be at least 1 step"):
        write_report([run_dir], run_dir / "p.html", smooth=0)
    (run_dir / "d.html").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        write_report([run_dir], run_dir / "d.html")
    assert read_run(run_dir, "a").last_step == 3


def test_names_are_the_shortest_distinct_suffixes() -> None:
    assert names_of([Path("/r/seed-0/grpo")]) == ["grpo"]
    assert names_of([Path("/r/seed-0/grpo"), Path("/r/seed-1/grpo")]) == ["seed-0/grpo", "seed-1/grpo"]
    assert names_of([Path("/a/x"), Path("/b/x"), Path("/b/y")]) == ["a/x", "b/x", "b/y"]


class Scripts(HTMLParser):
    """Counts everything that a browser would execute or load."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes |= {name for name, _ in attrs}


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--<script>]]>&lt;b&gt;\u2028\x00%%data%%"


def test_text_of_a_run_never_becomes_markup(run_dir: Path) -> None:
    clean = Scripts()
    clean.feed(render(content(read_runs([run_dir]), 1)))
    rows = [Sample(step=1, kind=EVIL, prompt=EVIL, completion=EVIL, **{EVIL: EVIL})]
    metrics = [{"step": 1, f"train/{EVIL}\ud800": 1.0}]
    run = Run(f"{EVIL}\ud800", Path(EVIL.replace("\x00", "")), metrics, rows, {EVIL: EVIL}, {EVIL: EVIL}, notes=[EVIL])
    page = render(content([run], 1))
    found = Scripts()
    found.feed(page.encode("utf-8").decode())
    assert found.elements == clean.elements
    assert found.attributes == clean.attributes
    assert data_of(page)["runs"][0]["samples"]["rows"][0][3] == EVIL
    assert not {name for name in found.attributes if name.startswith("on")}


@pytest.mark.slow
@settings(deadline=None)  # the first page takes longer
@given(st.text(max_size=60))
def test_any_text_survives_a_round_trip_through_the_page(text: str) -> None:
    page = render(content([Run("r", Path("r"), [{"step": 1.0}], [Sample(step=1, prompt="p", completion=text)])], 1))
    assert data_of(page.encode("utf-8").decode())["runs"][0]["samples"]["rows"][0][3] == text
    assert page.count("</script>") == 2


def test_the_page_makes_no_requests(run_dir: Path) -> None:
    page = render(content(read_runs([run_dir]), 1))
    found = Scripts()
    found.feed(page)
    assert not {"link", "img", "iframe", "object", "embed"} & set(found.elements)
    assert not {"src", "srcset", "action"} & found.attributes
    assert "default-src 'none'" in page
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert "innerHTML" not in page
    assert "eval(" not in page


def test_a_long_series_keeps_its_ends_and_extremes() -> None:
    values = [0.0] * 5000
    values[1234], values[4000], values[0], values[-1] = 9.0, -7.0, 3.0, 4.0
    at, mean, low, high = thin([float(i) for i in range(5000)], values, 1000)
    assert (max(high), min(low)) == (9.0, -7.0)
    assert (mean[0], mean[-1], at[0], at[-1]) == (3.0, 4.0, 0.0, 4999.0)
    assert len(mean) == 2 + math.ceil(4998 / 11)  # each of the 4,998 is in one of 454 buckets of 11 and one of 4
    assert thin([1.0, 2.0], [5.0, 6.0], 2) == [[1.0, 2.0], [5.0, 6.0]]


@pytest.mark.slow
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(4, 60))
def test_thinning_preserves_extremes(values: list[float], points: int) -> None:
    at, *found = thin([float(i) for i in range(len(values))], values, points)
    assert len(at) <= points
    assert max(map(max, found)) == max(values)
    assert min(map(min, found)) == min(values)
    assert at == sorted(at)


def test_samples_are_thinned_by_whole_steps_and_keep_the_last() -> None:
    rows = [
        Sample(step=step, kind=kind, prompt="1+1=", completion="x" * 56)
        for step in range(1, 11)
        for kind in ("train", "validation")
    ]
    kept = thin_samples(rows, 2 * 400)  # each step of a kind is 56 + 4 + 40 = 100: four fit into its half
    assert [row.step for row in kept if row.kind == "train"] == [1, 4, 7, 10]
    assert len(kept) == 8
    assert [row.step for row in thin_samples(rows, 0) if row.kind == "train"] == [10]
    assert thin_samples([], 100) == []


def test_phases_add_up_to_the_step() -> None:
    run = Run("r", Path("r"), [{"step": float(i), "time/a": 1.0, "time/b": 2.0, "time/step": 4.0} for i in range(1, 5)])
    phases = phases_of(run, columns=2)
    assert phases == {
        "names": ["a", "b", "other"],
        "from": [1, 3],
        "to": [2, 4],
        "values": [[1, 1], [2, 2], [1, 1]],
        "totals": [4, 8, 4],
    }
    assert phases_of(Run("r", Path("r"), [{"step": 1.0, "time/step": 1.0}])) is None


def test_breakdowns_of_profiled_steps_and_of_the_step_with_the_highest_peak() -> None:
    history = [{"step": float(i), "time/step": 4.0, "memory/peak_mb": float(i), "memory/weights_mb": 10.0 * i,
                "memory/activations_mb": 5.0} for i in (1, 3, 2)]  # fmt: skip
    times = {"compute": 2.0, "communication": 1.5, "exposed_communication": 1.0, "copies": 0.5, "idle": 0.5}
    for row in history[1:]:
        row |= {f"time/device/{name}": value for name, value in times.items()}
    history[0]["memory/peak_generation_mb"] = 7.0
    run = Run("r", Path("r"), history)
    found = breakdowns_of(run)
    assert [each["bars"] for each in found] == [
        [(3, [2, 1, 0.5, 0.5]), (2, [2, 1, 0.5, 0.5])],
        [(3, [30, 0, 0, 5])],
        [(1, [0, 0, 7, 0, 0])],
    ]
    assert [each["adds_up"] for each in found] == [True, True, False]
    assert found[0]["names"] == ["compute", "exposed communication", "copies", "idle"]
    shown = {name for _, _, charts in arrange(run.names) for chart in charts for name in chart.names}
    assert shown == {"time/step", "memory/peak_mb"}
    assert breakdowns_of(Run("r", Path("r"), [{"step": 1.0, "time/device/wait": 1.0}])) == []


def test_every_metric_has_a_chart_in_one_group() -> None:
    names = ["step", "time", "time/train", "time/step", "train/reward", "validation/reward", "train/lr",
             "train/entropy", "train/completion_length", "memory/rss_mb", "my/own", "time/refit", "refit/version",
             "refit/probe_error", "validation/refit_seconds", "validation/pass@4", "validation/pass@4_low",
             "validation/pass@4_high", "train/clip_high"]  # fmt: skip
    arranged = {key: [chart.names for chart in charts] for key, _, charts in arrange(names)}
    assert arranged == {
        "outcome": [
            ["train/reward", "validation/reward"],
            ["validation/pass@4"],
        ],
        "optimisation": [["train/lr"]],
        "policy": [["train/entropy"], ["train/clip_high"]],
        "completions": [["train/completion_length"]],
        "speed": [["time/step"], ["memory/rss_mb"]],
        "refit": [["refit/probe_error"], ["refit/version"], ["validation/refit_seconds"], ["time/refit"]],
        "other": [["my/own"]],
    }
    drawn = [chart for _, _, charts in arrange(names) for chart in charts]
    assert [name for chart in drawn for name in chart.intervals] == ["validation/pass@4"]


def test_constant_and_duplicate_metrics_are_listed_as_text() -> None:
    history = [{"step": i, "train/loss": 1.0 / i, "train/policy_loss": 1.0 / i, "train/grad_norm": 2.0} for i in (1, 2)]
    [group] = content([Run("r", Path("r"), history)], 1)["groups"]
    assert [chart["quantity"] for chart in group["charts"]] == ["loss"]
    assert group["same"] == [("Policy loss", "Loss")]
    assert group["constant"] == [("Gradient norm", 2.0)]


def test_settings_are_flat_and_without_secrets() -> None:
    assert settings_of({"a": {"b": 1, "c": {}}, "d": [1], "api_key": "xyz"}) == {
        "a.b": "1",
        "a.c": "{}",
        "d": "[1]",
        "api_key": "***",
    }
    machine = {"devices": [{"name": "x", "memory_bytes": 2**31}, {"name": "x", "memory_bytes": 2**30}]}
    assert settings_of({"host": machine, "earlier": [{"started": "monday", "git": None}]}) == {
        "host.devices.x": "2.0 GiB, 1.0 GiB",
        "earlier": "monday",
    }
    assert settings_of(None) is None


def test_steps_that_follow_from_passes_are_no_setting() -> None:
    assert settings_of({"algorithm": {"num_steps": 0, "num_epochs": 2}}) == {"algorithm.num_epochs": "2"}


@pytest.mark.slow
def test_an_interval_is_a_band_of_its_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(figures, "write_png", lambda figure, _: kept.append(figure))
    name, rows = "validation/pass@4", ((1, 0.2, 0.1, 0.4), (2, 0.5, 0.3, 0.7))
    history = [{"step": float(i), name: of, f"{name}_low": low, f"{name}_high": high} for i, of, low, high in rows]
    with_interval, without = Run("a", Path("a"), history), Run("b", Path("b"), [{"step": 1.0, name: 0.5}])
    draw_figures([with_interval, without], tmp_path, 1)
    [axes] = kept[0].axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[0.2, 0.5], [0.5]]
    [band] = axes.collections
    corners = {tuple(point) for point in band.get_paths()[0].vertices.tolist()}
    assert corners == {(1.0, 0.1), (1.0, 0.4), (2.0, 0.3), (2.0, 0.7)}


def test_figures_of_names_that_no_font_can_show(tmp_path: Path) -> None:
    name = "\x1b[2J\ud800\u202e"
    run = Run(name, Path("r"), [{"step": 1.0, f"train/{name}": 1.0, f"time/{name}": 1.0, "time/step": 1.0}])
    assert draw_figures([run], tmp_path, 1)
