"""Console output: plain lines, and the live display on a terminal."""

import io
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from rlframework.observers.console import EVERY, ConsoleObserver, Pace, duration, progress_bar
from rlframework.plugins.hookspec import RunInfo
from rlframework.training.loop import StepLoop


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def info(tmp_path, steps=60, name="grpo"):
    return RunInfo(SimpleNamespace(algorithm=SimpleNamespace(name=name, num_steps=steps)), tmp_path)


@pytest.fixture
def clock():
    return Clock()


def begin(stream, clock, tmp_path, steps=60, name="grpo"):
    observer = ConsoleObserver(stream, clock)
    observer.rlframework_run_started(info(tmp_path, steps, name))
    return observer


def test_lines_show_step_known_metrics_pace_and_remaining_time(tmp_path, clock):
    stream = io.StringIO()
    observer = begin(stream, clock, tmp_path)
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
                "memory/rss_mb": 2048.4,
                "memory/peak_mb": 4096.4,
            },
        )
        clock.now += 1.8 if step < 12 else 0.0
    # twelve steps of 1.8 s; 48 steps of 1.8 s are 86.4 s
    line = next(line for line in stream.getvalue().splitlines() if line.startswith("step 12/60"))
    assert line == (
        "step 12/60  reward 0.410  accuracy 0.520  loss -0.01235  KL 0.05  1,235 tokens/s  peak worker memory 4,096 MiB"
        "  1.8 s/step, remaining 1m26s"
    )


def test_validation_metrics_are_shown_if_measured(tmp_path, clock):
    stream = io.StringIO()
    observer = begin(stream, clock, tmp_path, steps=2, name="sft")
    observer.rlframework_step_finished(0, {"validation/accuracy": 0.0})
    clock.now += 1.0
    observer.rlframework_step_finished(1, {"train/loss": 2.5})
    clock.now += 1.0
    observer.rlframework_step_finished(2, {"train/loss": 1.25, "validation/accuracy": 0.3125})
    observer.rlframework_run_finished({"train/loss": 1.25, "validation/accuracy": 0.3125})
    assert stream.getvalue().splitlines() == [
        f"sft: up to 2 steps, writing to {tmp_path}",
        "step 0/2  validation accuracy 0.000",
        "step 1/2  loss 2.5  1 s/step, remaining 1s",
        "step 2/2  validation accuracy 0.312  loss 1.25  1 s/step, remaining 0s",
        "sft finished after 2 steps in 2s  validation accuracy 0.312  loss 1.25",
    ]


def test_fast_steps_do_not_flood_the_log_and_slow_ones_all_show(tmp_path, clock):
    def lines(seconds_a_step, steps):
        stream = io.StringIO()
        observer = begin(stream, clock, tmp_path, steps=1000)
        for step in range(1, steps + 1):
            clock.now += seconds_a_step
            observer.rlframework_step_finished(step, {"train/loss": 1.0})
        return stream.getvalue().count("step ")

    assert lines(0.01, 500) <= 7  # five seconds: the first, then one a second
    assert lines(12.0, 50) == 50


def test_validation_and_the_last_step_are_always_shown(tmp_path, clock):
    stream = io.StringIO()
    observer = begin(stream, clock, tmp_path, steps=5)
    for step in range(1, 6):
        observer.rlframework_step_finished(step, {"validation/accuracy": 0.5} if step == 3 else {})
    shown = [line.split()[1] for line in stream.getvalue().splitlines()[1:]]
    assert shown == ["1/5", "3/5", "5/5"]


@pytest.mark.parametrize("finishes", [True, False])
def test_a_terminal_gets_a_display_and_its_cursor_is_restored(tmp_path, clock, monkeypatch, finishes):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    observer = begin(stream, clock, tmp_path)
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
    assert ending.endswith("grpo finished after 1 steps in 2s  reward 0.250\n") == finishes


def test_a_dumb_terminal_gets_plain_lines(tmp_path, clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    observer = begin(stream, clock, tmp_path)
    observer.rlframework_step_finished(1, {"train/loss": 1.0})
    observer.close()
    assert "\x1b" not in stream.getvalue()
    assert "step 1/60  loss 1" in stream.getvalue()


def test_the_pace_forgets_old_steps():
    pace = Pace(total=100, now=0.0)
    assert str(pace) == ""
    now = 0.0
    for step in range(1, 51):
        now += 10.0 if step <= 30 else 1.0
        pace.mark(step, now)
    assert str(pace) == "1 s/step, remaining 50s"  # of the last twenty steps


def test_the_time_before_the_first_step_is_not_part_of_the_pace():
    pace = Pace(total=10, now=0.0)
    pace.mark(0, 500.0)
    pace.mark(1, 503.0)
    assert str(pace) == "3 s/step, remaining 27s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (80, "1m20s"),
        (3599.9, "1h00m"),
        (7500, "2h05m"),
        (273_600, "3d04h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


class OneStep(StepLoop):
    """A loop whose step returns no metrics, with a policy of workers that report `infos`."""

    def __init__(self, infos):
        self.parts = SimpleNamespace(
            policy=SimpleNamespace(reset_peak_memory_stats=lambda: None, get_info=lambda: infos),
            generation=SimpleNamespace(pop_metrics=dict),
        )
        self.profiling = SimpleNamespace(step=lambda step: nullcontext())
        self.recorder = SimpleNamespace(require=lambda step: None)

    def train_step(self, step, timer):
        return {}, []


@pytest.mark.parametrize(
    ("infos", "shown"),
    [
        ([{"peak_memory_bytes": 700 << 20}, {"peak_memory_bytes": 900 << 20}, {}], "peak worker memory 900 MiB"),
        ([{}, {}], None),
    ],
)
def test_the_printed_memory_is_the_largest_peak_of_the_workers(infos, shown, tmp_path, clock):
    stream = io.StringIO()
    observer = begin(stream, clock, tmp_path, steps=1)
    metrics, _ = OneStep(infos)._timed_step(1)
    assert metrics["memory/rss_mb"] > 0  # of the driver, which is not printed
    observer.rlframework_step_finished(1, metrics)
    memory = [part for part in stream.getvalue().splitlines()[1].split("  ") if "memory" in part]
    assert memory == ([] if shown is None else [shown])


# -- progress of other commands ---------------------------------------------------------------------------------------


def test_a_line_with_the_remaining_time_is_printed_after_each_interval(clock, capsys):
    with progress_bar("rows", clock) as tell:
        for intervals, done in ((0.3, 100), (1, 250), (1.3, 300), (3, 900), (4.2, 1000)):
            clock.now = 100.0 + intervals * EVERY
            tell(done, 1000)
    # 250 in 30 s: 750 more take 90 s; 900 in 90 s: 100 more take 10 s
    lines = ["rows: 250 of 1,000, 90 s left", "rows: 900 of 1,000, 10 s left", "rows: 1,000 of 1,000"]
    assert capsys.readouterr().err.splitlines() == lines


def test_no_remaining_time_before_any_progress(clock, capsys):
    with progress_bar("rows", clock) as tell:
        clock.now += EVERY
        tell(0, 10)
    assert capsys.readouterr().err == "rows: 0 of 10\n"
