"""The metrics of speed and memory of a step, by hand."""

from __future__ import annotations

import pytest

from rlframework.algorithms.performance import performance_metrics

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
