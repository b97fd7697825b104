"""A worker's report on itself, on a CPU."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from rlframework.base.errors import NotSupported
from rlframework.config.policy import PolicyConfig
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.plugins.discovery import load_target
from rlframework.policy.shared_state import peak_resident_bytes, reset_peak_resident_bytes

MIB = 2**20


@pytest.fixture
def worker(tiny_llama):
    made = load_target("rlframework_dtensor.worker:DTensorPolicyWorker")(
        PolicyConfig(model_name=str(tiny_llama)),
        load_tokenizer(str(tiny_llama)),
        init_optimizer=False,
        init_reference_model=False,
        context=WorkerContext(),
    )
    yield made
    made.shutdown()


@pytest.mark.slow
def test_a_worker_reports_what_it_runs_on(worker, monkeypatch):
    monkeypatch.setenv("CUDA_MADE_UP", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("SECRET_KEY", "s")
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    info = worker.get_gpu_info()
    assert {name: info[name] for name in ("rank", "world_size", "local_rank")} == {
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
    }
    assert (info["device_name"], info["device_count"], info["local_device_id"]) == ("cpu", 0, None)
    reported = {name: value for name, value in info["env_vars"].items() if name in ("CUDA_MADE_UP", "RANK")}
    assert reported == {"CUDA_MADE_UP": "1", "RANK": "0"}
    assert all(name.startswith("CUDA") or name == "RANK" for name in info["env_vars"])
    sample = info["parameter_sample"]
    weight = dict(worker.engine.model.named_parameters())[sample["name"]]
    assert sample | {"name": ""} == {"name": "", "device": "cpu", "shape": list(weight.shape), "dtype": "torch.float32"}
    assert worker.report_device_id() == info["global_device_id"] == f"CPU-{socket.gethostname()}-{os.getpid()}"
    assert repr(worker) == "DTensorPolicyWorker[rank=0]"
    assert worker.is_alive()


@pytest.mark.slow
def test_the_peak_covers_allocations_since_the_reset(worker):
    worker.reset_peak_memory_stats()
    before = worker.get_gpu_info()
    held = torch.ones(200 * MIB // 4)
    del held
    after = worker.get_gpu_info()
    assert before["peak_memory_allocated_mb"] - before["memory_allocated_mb"] < 100
    assert 150 < after["peak_memory_allocated_mb"] - before["memory_allocated_mb"] < 300
    assert worker.get_info()["peak_memory_bytes"] == pytest.approx(after["peak_memory_allocated_mb"] * MIB, rel=0.05)
    worker.reset_peak_memory_stats()
    assert worker.get_gpu_info()["peak_memory_allocated_mb"] < after["peak_memory_allocated_mb"] - 100


def test_the_peak_is_0_if_the_system_does_not_report_it(monkeypatch):
    assert peak_resident_bytes() > MIB

    def missing(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    assert peak_resident_bytes() == 0
    reset_peak_resident_bytes()


@pytest.mark.slow
def test_a_range_of_the_cuda_profiler_needs_a_gpu(worker):
    for call in (worker.start_gpu_profiling, worker.stop_gpu_profiling):
        with pytest.raises(NotSupported, match=r"needs a GPU.*section `profiler`"):
            call()
