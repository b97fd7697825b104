"""Console output: plain lines, and the live display on a terminal."""

import io
from types import SimpleNamespace

import pytest

from rlframework.observers.console import ConsoleObserver, Pace, describe, duration
from rlframework.observers.run_environment import Resumed, write_environment
from rlframework.plugins.hookspec import RunInfo
from rlframework_tools.command_output import EVERY, progress_bar


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def begin(tmp_path, clock):
    """`begin(stream, steps=..., name=..., every=..., metric=...)`: an observer of a run that has started."""

    def begin(stream, steps=60, name="grpo", every=0, metric="validation/accuracy"):
        checkpoints, resume = SimpleNamespace(every=every, metric=metric), f"rlframework train --resume {tmp_path}"
        algorithm = SimpleNamespace(name=name, num_steps=steps)
        config = SimpleNamespace(algorithm=algorithm, checkpoints=checkpoints, resume_command=resume)
        observer = ConsoleObserver(stream, clock)
        observer.rlframework_run_started(RunInfo(config, tmp_path))
        return observer

    return begin


def test_lines_show_step_known_metrics_pace_and_remaining_time(begin, clock):
    stream = io.StringIO()
    observer = begin(stream)
    for step in range(13):
        observer.rlframework_step_finished(
            step,
            {
                "train/reward": 0.41,
                "train/accuracy": 0.52,
                "train/loss": -0.0123456,
                "train/kl": 0.05,
                "other/thing": 7.0,
                "throughput/tokens_per_second": 1234.6,
                "throughput/tokens_per_second_per_worker": 308.65,
                "throughput/mfu": 0.4321,
                "memory/rss_mb": 2048.4,
                "memory/peak_mb": 4096.4,
            },
        )
        clock.now += 1.8 if step < 12 else 0.0
    # twelve steps of 1.8 s; 48 steps of 1.8 s are 86.4 s
    line = next(line for line in stream.getvalue().splitlines() if line.startswith("step 12/60"))
    assert line == (
        "step 12/60  reward 0.410  accuracy 0.520  loss -0.01235  KL 0.05  1,235 tokens/s  309 per worker"
        "  MFU 43.2%  peak worker memory 4,096 MiB  1.8 s/step, remaining 1m26s"
    )


REWARDS = {"train/reward": 0.5, "train/reward/answer": 0.375, "train/reward/format": 1.0}
SCORES = {"train/environment_reward": 0.5, "train/model_score": -0.25}


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        (  # of a single worker
            {"throughput/tokens_per_second": 1234.6, "throughput/tokens_per_second_per_worker": 1234.6},
            "1,235 tokens/s",
        ),
        ({"validation/loss": 2.53372}, "validation loss 2.534"),
        ({"validation/loss": 2.5, "validation/accuracy": 0.5}, "validation accuracy 0.500"),
        ({"validation/accuracy": 1.0, "validation/samples": 19.0}, "validation accuracy 1.000 of 19"),
        ({"validation/accuracy": 1.0, "validation/samples": 20.0}, "validation accuracy 1.000"),
        (REWARDS, "reward 0.500 (answer 0.375, format 1)"),
        ({"train/reward": 0.5, "train/reward/answer": 0.375}, "reward 0.500"),
        (
            REWARDS | {f"train/reward/part{number}": 0.0 for number in range(3)},
            "reward 0.500 (answer 0.375, format 1, part0 0, part1 0, ...)",
        ),
        (REWARDS | SCORES, "reward 0.500 (model_score -0.25, answer 0.375, format 1)"),
        ({"train/reward": 0.25} | SCORES, "reward 0.250 (model_score -0.25, environment_reward 0.5)"),
    ],
)
def test_metrics_that_belong_together_are_one_text(metrics, shown):
    assert describe(metrics) == [shown]


def test_the_metric_that_chooses_the_best_checkpoint_is_always_shown(begin):
    stream = io.StringIO()
    observer = begin(stream, metric="validation/reward")
    observer.rlframework_step_finished(0, {"validation/accuracy": 0.0, "validation/reward": -0.123456})
    observer.rlframework_run_finished({"validation/reward": 0.5})
    _, validated, end = stream.getvalue().splitlines()
    assert validated == "step 0/60  validation accuracy 0.000  validation/reward -0.1235"
    assert end.endswith("  validation/reward 0.5")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["lines", "terminal"])
def test_the_end_shows_the_parts_of_the_last_reward(begin, stream):
    """`metrics` of the end are the latest of each name, also of parts that only earlier steps had."""
    first = {"train/reward": 1.0, "train/reward/won": 1.0, "train/reward/quick": 0.5, "train/failed_fraction": 0.0}
    last = {"train/reward": 0.0, "train/reward/won": 0.0, "train/reward/lost": 1.0, "train/failed_fraction": 0.75}
    observer = begin(stream, steps=2)
    observer.rlframework_step_finished(1, first)
    observer.rlframework_step_finished(2, last)
    observer.rlframework_run_finished(first | last)
    *_, step, end = stream.getvalue().splitlines()
    assert "reward 0.000 (won 0, lost 1)  75% of the episodes failed" in step
    assert end.removeprefix("\x1b[?25h") == (
        "grpo finished after 2 steps in 0s  reward 0.000 (won 0, lost 1)  38% of the episodes failed"
    )


def test_the_first_the_last_and_validated_steps_are_always_shown(begin, tmp_path, clock):
    stream = io.StringIO()
    observer = begin(stream, steps=4, name="sft")
    observer.rlframework_step_finished(0, {"validation/accuracy": 0.0})
    for step, metrics in enumerate([{}, {"validation/accuracy": 0.5}, {}, {"train/loss": 1.25}], start=1):
        clock.now += 0.5
        observer.rlframework_step_finished(step, metrics)
    observer.rlframework_run_finished({"train/loss": 1.25, "validation/accuracy": 0.3125})
    assert stream.getvalue().splitlines() == [
        f"sft: up to 4 steps, writing to {tmp_path}",
        "step 0/4  validation accuracy 0.000",
        "step 1/4  0.5 s/step, remaining 2s",
        "step 2/4  validation accuracy 0.500  0.5 s/step, remaining 1s",
        "step 4/4  loss 1.25  0.5 s/step, remaining 0s",
        "sft finished after 4 steps in 2s  validation accuracy 0.312  loss 1.25",
    ]


def test_a_resume_and_what_it_changes_is_shown(begin, tmp_path, clock):
    changed = {"policy.optimizer.lr": (0.5, 0.1), "algorithm.preset": (None, "trl")}
    write_environment(tmp_path, resumed=Resumed(after_step=3, changed=changed))
    stream = io.StringIO()
    observer = begin(stream, steps=9, name="sft")
    clock.now += 2.0
    observer.rlframework_step_finished(4, {})
    assert stream.getvalue().splitlines()[1:] == [
        "resumed after step 3 with policy.optimizer.lr 0.5 -> 0.1, algorithm.preset null -> trl",
        "step 4/9  2 s/step, remaining 10s",
    ]


@pytest.mark.parametrize(("every", "shown"), [(1, "every step"), (50, "every 50 steps")])
def test_the_command_that_resumes_the_run_is_shown_at_the_start(begin, tmp_path, every, shown):
    stream = io.StringIO()
    begin(stream, every=every)
    [_, line] = stream.getvalue().splitlines()
    assert line == f"a checkpoint {shown}; to resume: rlframework train --resume {tmp_path}"


def test_fast_steps_do_not_flood_the_log_and_slow_ones_all_show(begin, clock):
    def lines(seconds_a_step, steps):
        stream = io.StringIO()
        observer = begin(stream, steps=1000)
        for step in range(1, steps + 1):
            clock.now += seconds_a_step
            observer.rlframework_step_finished(step, {"train/loss": 1.0})
        return stream.getvalue().count("step ")

    assert lines(0.01, 500) <= 7  # five seconds: the first, then one a second
    assert lines(12.0, 50) == 50


@pytest.mark.parametrize("finishes", [True, False])
def test_a_terminal_gets_a_display_and_its_cursor_is_restored(begin, clock, monkeypatch, finishes):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    observer = begin(stream)
    clock.now += 2.0
    observer.rlframework_step_finished(1, {"train/reward": 0.25, "memory/rss_mb": 99.0, "memory/peak_mb": 1234.0})
    shown = stream.getvalue()
    assert "1/60" in shown
    assert "reward 0.250" in shown
    assert "peak worker memory 1,234 MiB" in shown
    assert "\x1b[?25l" in shown  # hides the cursor
    if finishes:
        observer.rlframework_run_finished({"train/reward": 0.25})
    observer.close()
    ending = stream.getvalue().removeprefix(shown)
    assert "\x1b[?25h" in ending  # shows the cursor again
    assert ending.endswith("grpo finished after 1 step in 2s  reward 0.250\n") == finishes


def test_the_pace_is_that_of_the_last_twenty_steps_without_the_time_before_the_first():
    pace = Pace(total=100, now=0.0)
    pace.mark(0, 500.0)
    assert str(pace) == ""
    pace.mark(1, 503.0)
    assert str(pace) == "3 s/step, remaining 4m57s"
    for step in range(2, 51):
        pace.mark(step, 600.0 + step)
    assert str(pace) == "1 s/step, remaining 50s"


def test_durations():
    shown = [duration(seconds) for seconds in (0.4, 59.4, 59.6, 80, 3599.9, 7500, 273_600)]
    assert shown == ["0s", "59s", "1m00s", "1m20s", "1h00m", "2h05m", "3d04h"]


def test_a_command_prints_a_line_with_the_remaining_time_after_each_interval(clock, capsys):
    with progress_bar("rows", clock) as tell:
        for intervals, done in ((0.3, 0), (1, 0), (2, 250), (2.3, 300), (3, 900), (4.2, 1000)):
            clock.now = 100.0 + intervals * EVERY
            tell(done, 1000)
    # 250 in 60 s: 750 more take 180 s; 900 in 90 s: 100 more take 10 s
    lines = ["rows: 0 of 1,000", "rows: 250 of 1,000, 180 s left", "rows: 900 of 1,000, 10 s left",
             "rows: 1,000 of 1,000"]  # fmt: skip
    assert capsys.readouterr().err.splitlines() == lines
