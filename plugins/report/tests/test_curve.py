"""The plot of a run's training curves, and its series."""

import math
from types import SimpleNamespace

import pytest
from matplotlib import rc_context

from rlframework.observers.jsonl import series
from rlframework.plugins.hookspec import RunInfo
from rlframework_report import curve
from rlframework_report.curve import STYLE, CurveObserver, curve_figure, draw_curve, seconds_of, smoothed

SFT = [{"step": 0.0, "validation/accuracy": 0.0}, *({"step": float(i), "train/loss": 3.0 / i} for i in range(1, 11))]
GRPO = [
    {"step": float(i), "train/reward": i / 10, "train/loss": 0.01, "train/kl": 0.1 * i, "time/step": 2.0}
    for i in range(1, 6)
]
GRPO[-1]["validation/accuracy"] = 0.75
NAMES = SimpleNamespace(algorithm=SimpleNamespace(name="grpo"), environment=SimpleNamespace(name="addition"))


def plots(histories, along="steps"):
    with rc_context(STYLE):
        return {axes.get_title(loc="left"): axes for axes in curve_figure(histories, "title", along).axes}


def test_series_skip_missing_and_non_finite_values():
    rows = [{"a": 1.0}, {"b": 2.0}, {"a": math.nan}, {"a": 4.0}]
    assert series(rows, "a", [10.0, 20.0, 30.0, 40.0]) == ([10.0, 40.0], [1.0, 4.0])
    assert series(rows, "c", [10.0, 20.0, 30.0, 40.0]) == ([], [])


def test_smoothing_by_hand():
    # span 3: a step back counts half; (4 + 0.5 * 1) / 1.5 = 3, and after a gap of two (7 + 0.25 * 4.5) / (1 + 0.375)
    assert smoothed([1, 2, 4], [1.0, 4.0, 7.0], 3) == pytest.approx([1.0, 3.0, 8.125 / 1.375])
    assert smoothed([1, 2], [1.0, 4.0], 1) == smoothed([1, 2], [1.0, 4.0], 0.5) == [1.0, 4.0]


def test_each_phase_has_a_column_and_each_quantity_a_row():
    drawn = plots([("sft", SFT), ("grpo", GRPO)])
    titles = [f"{phase}: {word}" for word in ("accuracy", "reward", "loss", "KL to the reference (nats/token)")
              for phase in ("sft", "grpo")]  # fmt: skip
    assert list(drawn) == titles
    faint, strong = drawn["grpo: reward"].get_lines()
    assert list(faint.get_xdata()) == [1, 2, 3, 4, 5]
    assert list(faint.get_ydata()) == list(strong.get_ydata()) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    [held_out] = drawn["grpo: accuracy"].get_lines()
    assert (list(held_out.get_xdata()), held_out.get_label()) == ([5], "held out, last 0.75")
    assert list(plots([("run", [{"train/reward": 0.5}])])) == ["reward"]


def test_seconds_are_summed_from_the_step_times():
    assert seconds_of([{}, {"time/step": 2.0}, {"time/step": math.nan}, {"time/step": 0.5}]) == [0.0, 2.0, 2.0, 2.5]
    drawn = plots([("grpo", GRPO)], along="seconds")
    assert list(drawn["reward"].get_lines()[0].get_xdata()) == [2, 4, 6, 8, 10]
    assert list(drawn.values())[-1].get_xlabel() == "training time (s)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "histories", [[], [("", [])], [("sft", SFT), ("grpo", GRPO)], [("x", [{"train/loss": math.nan}])]]
)
def test_the_curve_is_a_png_and_no_other_file_remains(tmp_path, histories):
    path = draw_curve(histories, tmp_path / "deep" / "curve.png", "title")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [entry.name for entry in path.parent.iterdir()] == ["curve.png"]


def test_the_curve_of_a_resumed_run_includes_earlier_steps(tmp_path, monkeypatch):
    """An earlier process recorded steps 1 to 3; this one resumes from step 2."""
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "train/loss": {n}}}\n' for n in (1, 2, 3)))
    drawn = []
    monkeypatch.setattr(curve, "draw_curve", lambda histories, *_: drawn.extend(histories))
    observer = CurveObserver()
    observer.rlframework_run_started(RunInfo(NAMES, tmp_path))
    observer.rlframework_step_finished(3, {"train/loss": 30.0})
    observer.rlframework_step_finished(4, {"train/loss": 40.0})
    observer.rlframework_run_finished(RunInfo(NAMES, tmp_path))
    [(_, rows)] = drawn
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
