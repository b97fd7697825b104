"""Peaks of memory by phase, and memory by what it holds, on an allocator that the test controls."""

from __future__ import annotations

import pytest
import torch

from rlframework.policy.device_memory import DeviceMemory


class Allocator:
    """Stands in for the counters of torch's CUDA allocator."""

    def __init__(self):
        self.allocated = self.most = 0

    def use(self, allocated):
        self.allocated = allocated
        self.most = max(self.most, allocated)

    def restart(self):
        self.most = self.allocated


@pytest.fixture
def gpu(monkeypatch):
    made = Allocator()
    for name, value in {
        "memory_allocated": lambda _: made.allocated,
        "memory_reserved": lambda _: made.allocated + 10,
        "max_memory_allocated": lambda _: made.most,
        "max_memory_reserved": lambda _: made.most + 10,
        "reset_peak_memory_stats": lambda _: made.restart(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return made


def test_each_phase_has_its_own_peak(gpu):
    memory = DeviceMemory(torch.device("cuda", 0))
    gpu.use(100)
    memory.reset()
    with memory.during("generation"):
        gpu.use(300)
        gpu.use(100)
    gpu.use(150)
    with memory.during("scoring"):
        with memory.during("scoring"):
            gpu.use(180)
        gpu.use(120)
    with memory.during("training"):
        gpu.use(250)
        gpu.use(120)
        assert memory.peaks()["training"] == (250, 260)  # also before the phase ends
    assert memory.peaks() == {
        "other": (150, 160), "generation": (300, 310), "scoring": (180, 190), "training": (250, 260)
    }  # fmt: skip
    assert memory.peak() == (300, 310)
    memory.reset()
    assert memory.peaks() == {"other": (120, 130)}


def test_a_failure_ends_the_phase(gpu):
    memory = DeviceMemory(torch.device("cuda", 0))

    def fail():
        gpu.use(500)
        raise RuntimeError

    with pytest.raises(RuntimeError), memory.during("training"):
        fail()
    gpu.use(20)
    memory.reset()
    assert memory.peaks() == {"other": (20, 30)}


def test_memory_by_what_it_holds(gpu):
    memory = DeviceMemory(torch.device("cuda", 0))
    gpu.use(100)
    memory.model_built()
    assert memory.parts() == {}
    for optimizer in (0, 200):  # created by the first step
        memory.reset()
        with memory.during("training"):
            memory.training_begins()
            gpu.use(100 + optimizer + 700)  # activations
            gpu.use(100 + optimizer + 90)  # gradients
            with memory.during_optimizer_step():
                gpu.use(100 + 200 + 90)
                gpu.use(100 + 200)
        assert memory.parts() == {
            "weights": 100, "optimizer": 200, "gradients": 90, "activations": 500 + optimizer - 90
        }  # fmt: skip


def test_a_cpu_has_neither_phases_nor_parts():
    memory = DeviceMemory(torch.device("cpu"))
    memory.model_built()
    with memory.during("training"), memory.during_optimizer_step():
        pass
    assert memory.parts() == {}
    assert list(memory.peaks()) == ["other"]
    assert memory.peak()[0] > 2**20
