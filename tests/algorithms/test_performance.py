"""The metrics of speed, memory and device time of a step, by hand, and what the garbage collector scans."""

from __future__ import annotations

import gc
import gzip
import json
import weakref
from collections.abc import Iterator

import pytest

from rlframework.algorithms.performance import (
    DeviceTime,
    collecting_what_is_new,
    device_time,
    performance_metrics,
    read_trace,
)

MIB = 2**20


def worker(name="cpu", **more):
    return {"device": "cpu" if name == "cpu" else "cuda:0", "device_name": name, **more}


def metrics(trained, workers, *, tokens=None, seconds=8.0, peak_flops=None):
    return performance_metrics(trained, workers, tokens=tokens, seconds=seconds, peak_flops=peak_flops)


TRAINED = [
    {"flops": 3e15, "times": {"train": 1.5, "device_wait": 1.0}},
    {"flops": 1e15, "times": {"train": 0.5, "device_wait": 0.25}},
]


def test_speed_is_per_worker_and_utilization_that_of_training():
    found = metrics(TRAINED, [worker("NVIDIA H100 80GB HBM3")] * 4, tokens=1600.0)
    assert found == {
        "throughput/tokens_per_second": 200,
        "throughput/tokens_per_second_per_worker": 50,
        "throughput/model_tflops_per_worker": 500,  # 4e15 in 2 s on 4 workers
        "throughput/mfu": pytest.approx(500 / 989),
        "time/device/wait": 1.25,
    }


def test_without_a_known_peak_there_is_no_utilization():
    for name in ("cpu", "Unheard Of 9000"):
        found = metrics(TRAINED, [worker(name)])
        assert found["throughput/model_tflops_per_worker"] == 2000
        assert "throughput/mfu" not in found
        assert metrics(TRAINED, [worker(name)], peak_flops=8e15)["throughput/mfu"] == 0.25
    assert "throughput/mfu" not in metrics(TRAINED, [worker("NVIDIA L4"), worker("cpu")])


def test_a_step_that_trains_nothing_or_an_unknown_model_has_no_flops():
    assert metrics([], [worker()]) == {}
    assert metrics([{"times": {"train": 1.0}}], [worker()]) == {}
    assert metrics([{"flops": 0.0, "times": {"train": 1.0}}], [worker()], peak_flops=1e12) == {}


def test_memory_is_that_of_the_worker_with_the_highest_peak():
    small = worker("NVIDIA H100", peak_memory_bytes=700 * MIB, peak_bytes_by_phase={"training": 700 * MIB})
    large = worker(
        "NVIDIA H100",
        peak_memory_bytes=900 * MIB,
        peak_reserved_bytes=1000 * MIB,
        peak_bytes_by_phase={"training": 900 * MIB, "generation": 300 * MIB},
        bytes_by_part={"weights": 100 * MIB, "activations": 500 * MIB},
    )
    assert metrics([], [small, large, worker()]) == {
        "memory/peak_mb": 900,
        "memory/peak_reserved_mb": 1000,
        "memory/peak_training_mb": 900,
        "memory/peak_generation_mb": 300,
        "memory/weights_mb": 100,
        "memory/activations_mb": 500,
    }


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


class Node:
    """An object in a cycle, which only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """No object is frozen, as in a program: a test session freezes its imports."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_older_objects_are_left_out_until_the_end_and_new_ones_are_collected() -> None:
    older = Node()
    gone = weakref.ref(older)
    with collecting_what_is_new():
        newer = weakref.ref(Node())
        del older
        gc.collect()
        assert newer() is None
        assert gone() is not None
    gc.collect()
    assert gone() is None


def test_what_a_program_has_frozen_stays_frozen() -> None:
    kept = Node()
    gc.freeze()
    with collecting_what_is_new():
        Node()
    assert gc.get_freeze_count() > 0
    assert not any(each is kept for each in gc.get_objects())  # which leaves out what is frozen
