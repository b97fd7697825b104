"""Peaks of memory by phase, and memory by what it holds, on an allocator that the test controls."""

from __future__ import annotations

import pytest
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.plugins.discovery import load_target
from rlframework.policy.shared_state import DeviceMemory


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


def test_the_calls_of_a_worker_are_in_their_phases(tiny_llama, monkeypatch):
    events = []
    worker = load_target("rlframework_dtensor.worker:DTensorPolicyWorker")(
        {"model_name": str(tiny_llama), "train_global_batch_size": 2},
        load_tokenizer(str(tiny_llama)),
        generation_target="rlframework_transformers.engine:TransformersEngine",
    )
    monkeypatch.setattr(DeviceMemory, "_enter", lambda self, phase: events.append(phase))

    def noted(name):
        method = getattr(worker.engine, name)

        def call(*given, **named):
            events.append(name)
            return method(*given, **named)

        return call

    for name in ("forward_backward", "whole_model", "gather_weights"):
        monkeypatch.setattr(worker.engine, name, noted(name))
    ones = torch.ones(2, 4)
    rows = BatchedDataDict(
        input_ids=torch.full((2, 4), 3), input_lengths=torch.tensor([4, 4]), token_mask=ones, sample_mask=ones[:, 0]
    )
    names = list(worker.prepare_info_for_collective())
    for call, expected in {
        lambda: worker.train(rows, NLLLoss()): ["training", "forward_backward", "other"],
        lambda: worker.get_logprobs(rows): ["scoring", "forward_backward", "other"],
        lambda: worker.get_topk_logits(rows, 2): ["scoring", "forward_backward", "other"],
        lambda: worker.exchange([], [], 0.0): ["generation", "whole_model", "other"],
        lambda: (worker.prepare_weights_for_ipc(), worker.get_weights_ipc_handles(names)): [
            "refit", "gather_weights", "other"
        ],
    }.items():  # fmt: skip
        events.clear()
        call()
        assert list(dict.fromkeys(events)) == expected
    worker.shutdown()
