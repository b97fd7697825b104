"""The time of a device by kind, by hand; and how the events of a trace are told apart."""

from __future__ import annotations

import gzip
import json

import pytest

from rlframework.algorithms.performance import DeviceTime, device_time, read_trace


def test_overlapping_work_counts_once_and_communication_is_exposed_where_nothing_computes():
    found = device_time(
        {
            "compute": [(5.0, 8.0), (1.0, 4.0), (2.0, 3.0)],  # 6 s; one kernel runs beside another
            "communication": [(3.0, 6.0), (9.0, 11.0)],  # 5 s, of them 4 to 5 and 9 to 11 without compute
            "copies": [(10.0, 12.0), (1.0, 2.0)],  # 11 to 12 with nothing else
        },
        0.0,
        20.0,
    )
    assert found == DeviceTime(compute=6, communication=5, exposed_communication=3, copies=1, idle=10)
    assert found.total == 20
    assert str(found) == "30% compute, 25% communication (15% without compute), 5% copies, 50% idle"


def test_work_outside_of_the_step_does_not_count():
    found = device_time({"compute": [(0.0, 2.0), (9.0, 12.0), (14.0, 15.0)]}, 1.0, 10.0)
    assert found == DeviceTime(compute=2, communication=0, exposed_communication=0, copies=0, idle=7)


def trace(path, events, **more):
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events, **more}).encode()))
    return path


def event(name, category, start, seconds):
    return {"ph": "X", "name": name, "cat": category, "ts": start * 1e6, "dur": seconds * 1e6}


RECORDING = event("PyTorch Profiler (0)", "Trace", 100, 10)


def test_a_trace_of_a_gpu_counts_its_kernels_and_no_operators_of_the_host(tmp_path):
    events = [
        RECORDING,
        {"ph": "i", "name": "Record Window End", "ts": 1.0},
        event("aten::mm", "cpu_op", 100, 9),
        event("cudaLaunchKernel", "cuda_runtime", 100, 9),
        event("nvjet_tst_128x256", "kernel", 101, 2),
        event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel", 102, 2),
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 105, 0.5),
        event("Memset (Device)", "gpu_memset", 105.25, 0.5),
    ]
    found = read_trace(trace(tmp_path / "t.json.gz", events, deviceProperties=[{"id": 0}]))
    assert found is not None
    assert vars(found) == pytest.approx(
        {"compute": 2, "communication": 2, "exposed_communication": 1, "copies": 0.75, "idle": 6.25}
    )


def test_without_a_gpu_operators_and_collectives_count(tmp_path):
    events = [
        RECORDING,
        event("aten::mm", "cpu_op", 101, 2),
        event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 101, 6),
        event("rlframework: loss", "user_annotation", 100, 9),
        event("c10d::allreduce_", "cpu_op", 102, 0.5),
        event("gloo:all_reduce", "user_annotation", 102, 3),
    ]
    found = read_trace(trace(tmp_path / "t.json.gz", events, deviceProperties=[]))
    assert found is not None
    assert vars(found) == pytest.approx(
        {"compute": 2, "communication": 3, "exposed_communication": 2, "copies": 0, "idle": 6}
    )


def test_a_trace_of_a_gpu_without_its_kernels_has_no_times(tmp_path):
    events = [RECORDING, event("aten::mm", "cpu_op", 101, 2)]
    assert read_trace(trace(tmp_path / "t.json.gz", events, deviceProperties=[{"id": 0}])) is None
    assert read_trace(tmp_path / "of another machine.json.gz") is None
