"""Profiled steps: readable traces, and the same numbers as without profiling."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from probe_runs import assert_same_weights

from rlframework import run
from rlframework.base.errors import NotSupported, WriteError
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy import profiling
from rlframework.policy.profiling import trace_span
from rlframework.policy.reporting import Reporting
from rlframework.policy.shared_state import DeviceMemory

pytestmark = pytest.mark.slow

SHORT = ["algorithm.num_steps=2"]


def events(path: Path) -> list[dict]:
    """The events that Perfetto draws: name, start and duration in microseconds."""
    found = json.loads(gzip.decompress(path.read_bytes()))
    return [event for event in found["traceEvents"] if event.get("ph") == "X"]


@pytest.mark.thorough
def test_the_chosen_step_leaves_a_trace_with_the_phases_and_changes_no_weight(run_config, tmp_path, caplog):
    config = run_config("grpo", "profiler={steps: [2], record_shapes: true}", *SHORT, "observers.peak_tflops=0.5")
    first, second = (row for row in run(config).history if row["step"])
    [path] = (config.output_dir / "traces").rglob("*.*")  # and nothing half-written beside it
    assert path.relative_to(config.output_dir) == Path("traces/step-000002/rank-0.json.gz")
    assert f"{path}" in caplog.text
    assert "https://ui.perfetto.dev" in caplog.text
    run(run_config("grpo", *SHORT, f"output_dir={tmp_path}/plain"))
    assert not (tmp_path / "plain" / "traces").exists()
    assert_same_weights(tmp_path / "plain", config.output_dir)

    parts = [second[f"time/device/{name}"] for name in ("compute", "exposed_communication", "copies", "idle")]
    assert sum(parts) == pytest.approx(second["time/step"], rel=0.2)
    assert parts[0] > 0 == sum(parts[1:3])  # one worker on a CPU
    assert not any(name.startswith("time/device/") for name in first)
    for row in (first, second):
        assert row["throughput/mfu"] == pytest.approx(row["throughput/model_tflops_per_worker"] / 0.5)
        assert 0 < row["throughput/mfu"] < 1

    found = sorted(events(path), key=lambda event: event["ts"])
    names = Counter(event["name"] for event in found)
    assert names[profiling.GENERATE] > 0
    assert 0 < names[profiling.LOSS] == names[profiling.BACKWARD] < names[profiling.FORWARD]  # scoring runs forward
    assert names[profiling.CLIP_AND_STEP] == 2  # 32 rows in batches of 16
    loss, backward, step = (
        next(event for event in found if event["name"] == phase)
        for phase in (profiling.LOSS, profiling.BACKWARD, profiling.CLIP_AND_STEP)
    )
    forward = [event for event in found if event["name"] == profiling.FORWARD and event["ts"] < loss["ts"]][-1]
    end = forward["ts"] + forward["dur"]
    assert end <= loss["ts"] < backward["ts"] < step["ts"]
    inside = [event for event in found if event["name"] == "aten::mm" and forward["ts"] <= event["ts"] <= end]
    assert inside
    assert all("Input Dims" in event["args"] for event in inside)


def test_a_range_of_steps_has_a_trace_each(run_config):
    config = run_config("sft", "profiler={start: 2, stop: 3}")
    run(config)
    assert sorted(path.name for path in (config.output_dir / "traces").iterdir()) == ["step-000002", "step-000003"]


def test_a_profiler_is_on_once_and_an_unwritable_trace_is_told(tmp_path):
    engine = SimpleNamespace(context=WorkerContext(), device=torch.device("cpu"))
    reporting = Reporting(engine, None, DeviceMemory(engine.device))
    assert reporting.stop_profiling(str(tmp_path)) is None
    reporting.start_profiling()
    with pytest.raises(NotSupported, match="already being profiled"):
        reporting.start_profiling()
    with trace_span(profiling.LOSS):
        torch.ones(2).sum()
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"cannot write .*rank-0.json.gz: a component of the path is a file"):
        reporting.stop_profiling(str(tmp_path / "file"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    reporting.start_profiling()  # it is off again
    assert reporting.stop_profiling(None) is None


def test_spans_cost_nothing_where_no_profiler_is_on():
    assert type(trace_span(profiling.LOSS)).__name__ == "nullcontext"
