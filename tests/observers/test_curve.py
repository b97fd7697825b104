"""The plot of a run's training curves, and its series."""

import math
from types import SimpleNamespace

import pytest
from matplotlib import rc_context

from rlframework.observers import curve
from rlframework.observers.curve import STYLE, CurveObserver, draw_curve, draw_phases, phases_of, smooth
from rlframework.observers.jsonl import seconds_of, series
from rlframework.plugins.hookspec import RunInfo

SFT = [{"step": 0.0, "validation/accuracy": 0.0}, *({"step": float(i), "train/loss": 3.0 / i} for i in range(1, 11))]
GRPO = [
    {"step": float(i), "train/reward": i / 10, "train/loss": 0.01, "train/kl": 0.1 * i, "time/step": 2.0}
    for i in range(1, 6)
]
GRPO[-1]["validation/accuracy"] = 0.75


def figure(phases, along="steps"):
    with rc_context(STYLE):
        return draw_phases(phases_of(phases, along), "title", along)


def test_smoothing_is_a_centred_mean_truncated_at_the_ends():
    assert smooth([1.0, 2.0, 6.0, 4.0], 3) == pytest.approx([1.5, 3.0, 4.0, 5.0])
    assert list(smooth([1.0, 5.0], 1)) == [1.0, 5.0]


def test_series_skip_missing_and_non_finite_values():
    rows = [{"a": 1.0}, {"b": 2.0}, {"a": math.nan}, {"a": 4.0}]
    assert series(rows, "a", [10.0, 20.0, 30.0, 40.0]) == ([10.0, 40.0], [1.0, 4.0])
    assert series(rows, "c", [10.0, 20.0, 30.0, 40.0]) == ([], [])


def test_positions_on_the_axis():
    phases = phases_of([("", []), ("", [{}, {}]), ("", SFT)], "steps")
    assert [(phase.start, phase.length) for phase in phases] == [(0, 0), (0, 2), (2, 10)]
    assert seconds_of([{}, {"time/step": 2.0}, {"time/step": math.nan}, {"time/step": 0.5}]) == [0.0, 2.0, 2.0, 2.5]


def test_phases_follow_each_other_with_a_line_between_them():
    top = figure([("sft", SFT), ("grpo", GRPO)]).axes[0]
    lines = {line.get_label(): line for line in top.get_lines()}
    assert list(lines["training reward"].get_xdata()) == [11, 12, 13, 14, 15]
    assert list(lines["validation accuracy (held out)"].get_xdata()) == [15]
    upright = [line for line in top.get_lines() if list(line.get_xdata()) == [10, 10]]
    assert len(upright) == 1
    assert {text.get_text() for text in top.texts} >= {"sft", "grpo", "75%"}


def test_loss_and_kl_get_panels_if_they_exist():
    titles = [axes.get_title(loc="left") for axes in figure([("sft", SFT), ("grpo", GRPO)]).axes[1:]]
    assert titles == ["sft: loss", "grpo: loss", "grpo: KL to reference (nats/token)"]
    assert len(figure([("run", [{"train/reward": 0.5}])]).axes) == 1


def test_a_reward_outside_zero_to_one_gives_accuracy_its_own_axis():
    rows = [{"train/reward": -2.0, "validation/accuracy": 0.5}, {"train/reward": 3.0, "validation/accuracy": 0.6}]
    reward, accuracy = figure([("grpo", rows)]).axes[:2]
    assert reward.get_ylim()[0] <= -2.0
    assert reward.get_ylim()[1] >= 3.0
    assert accuracy.get_ylim() == pytest.approx((-0.03, 1.08))


def test_small_fractions_fill_the_plot():
    rows = [
        {"train/reward": 0.01, "validation/accuracy": 0.02},
        {"train/reward": math.nan, "validation/accuracy": 0.06},
    ]
    assert figure([("grpo", rows)]).axes[0].get_ylim() == pytest.approx((-0.0036, 0.1296))
    nothing = [{"train/reward": 0.0}, {"train/reward": 0.0}]
    assert figure([("grpo", nothing)]).axes[0].get_ylim() == pytest.approx((-0.03, 1.08))


def test_seconds_are_summed_from_the_step_times():
    top = figure([("sft", [{"time/step": 5.0}]), ("grpo", GRPO)], along="seconds").axes[0]
    [reward] = [line for line in top.get_lines() if line.get_label() == "training reward"]
    assert list(reward.get_xdata()) == [7, 9, 11, 13, 15]
    assert top.get_xlabel() == "training time (s)"


@pytest.mark.parametrize(
    "histories", [[], [("", [])], [("sft", SFT), ("grpo", GRPO)], [("x", [{"train/loss": math.nan}])]]
)
def test_the_curve_is_a_png_and_no_other_file_remains(tmp_path, histories):
    path = draw_curve(histories, tmp_path / "deep" / "curve.png", "title")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [entry.name for entry in path.parent.iterdir()] == ["curve.png"]


def test_the_observer_draws_the_recorded_steps_at_the_end(tmp_path):
    named = SimpleNamespace(algorithm=SimpleNamespace(name="grpo"), environment=SimpleNamespace(name="addition"))
    observer = CurveObserver()
    observer.rlframework_step_finished(1, {"train/reward": 0.5})
    assert not (tmp_path / "curve.png").exists()
    observer.rlframework_run_finished(RunInfo(named, tmp_path))
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_the_curve_of_a_resumed_run_includes_earlier_steps(tmp_path, monkeypatch):
    """An earlier process recorded steps 1 to 3; this one resumes from step 2."""
    named = SimpleNamespace(algorithm=SimpleNamespace(name="sft"), environment=SimpleNamespace(name="addition"))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "train/loss": {n}}}\n' for n in (1, 2, 3)))
    drawn = []
    monkeypatch.setattr(curve, "draw_curve", lambda histories, *_: drawn.extend(histories))
    observer = CurveObserver()
    observer.rlframework_run_started(RunInfo(named, tmp_path))
    observer.rlframework_step_finished(3, {"train/loss": 30.0})
    observer.rlframework_step_finished(4, {"train/loss": 40.0})
    observer.rlframework_run_finished(RunInfo(named, tmp_path))
    [(_, rows)] = drawn
    assert [(row["step"], row["train/loss"]) for row in rows][:2] == [(1, 1.0), (2, 2.0)]
    assert [(row["step"], row["train/loss"]) for row in rows][2:] == [(3, 30.0), (4, 40.0)]
