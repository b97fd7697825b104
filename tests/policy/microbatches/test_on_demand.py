"""Microbatches are made one ahead of the device, which holds those that run."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch
from probe_forked import run_forked

from rlframework.batch.batch_rows import copy_to
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.data_processor import BatchPlan, MicrobatchRule
from rlframework.policy.microbatches.data_processor import MicrobatchProcessor
from rlframework.policy.microbatches.on_demand import Made, on_device, on_host

CPU = torch.device("cpu")


def six_rows() -> BatchedDataDict[int]:
    return BatchedDataDict(
        {"input_ids": torch.arange(24).view(6, 4), "input_lengths": torch.tensor([4, 2, 3, 4, 2, 3])}
    )


def test_each_is_made_when_first_asked_for_and_kept():
    asked = []

    def make(index):
        asked.append(index)
        return object()

    made = Made(3, make)
    assert len(made) == 3
    assert asked == []
    assert made[-1] is made[2]
    first, *others = made
    assert [first, *others] == made[0:3] == list(made)
    assert asked == [2, 0, 1]
    with pytest.raises(IndexError):
        made[3]


def test_on_the_cpu_they_are_the_same_objects():
    data, plan = six_rows(), BatchPlan("padded", 2, 0)
    made = MicrobatchProcessor().microbatches(data, plan, MicrobatchRule(), positions="all", device=CPU)
    assert on_device(made, CPU) is made is on_host(made)
    assert made[1] is made[1]
    assert made[1].host is None


def run_on_the_counting_device() -> None:
    """Print, in order, what is made on the host and run on the device, and how many copies live at each time."""
    import counting_device

    counting_device.register()
    device = torch.device(counting_device.NAME, 0)
    data, plan, events, copies = six_rows(), BatchPlan("padded", 2, 0), [], []
    host = MicrobatchProcessor().microbatches(data, plan, MicrobatchRule(), positions="all", device=CPU)

    def make(index):
        events.append(f"make {index}")
        return host[index]

    with counting_device.counting() as counts:
        for number, microbatch in enumerate(on_device(Made(3, make), device)):
            copies.append(weakref.ref(microbatch))
            events.append(f"run {number}")
            microbatch.processed_inputs.input_ids.sum()
            gc.collect()
            events.append(sum(copy() is not None for copy in copies))
            assert microbatch.data_dict["input_ids"].device == microbatch.targets.device == device
            assert microbatch.rows.device == microbatch.host.targets.device == CPU
    print(json.dumps([events, counts.waits]))


@pytest.mark.slow
def test_the_next_is_made_after_the_launch_of_the_one_before_and_nothing_waits():
    done = run_forked(run_on_the_counting_device)
    assert done.returncode == 0, done.stderr
    events, waits = json.loads(done.stdout)
    assert [event for event in events if isinstance(event, str)] == [
        *("make 0", "run 0", "make 1"),
        *("run 1", "make 2", "run 2"),
    ]
    assert max(event for event in events if isinstance(event, int)) <= 2
    assert waits == []


def test_an_expanded_tensor_is_pinned_as_a_copy(monkeypatch):
    """Pinning a tensor whose elements share memory is an error of torch: position ids of padded rows are such."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor)
    copied = copy_to(torch.arange(3).expand(2, 3), torch.device("cuda"))
    assert pinned[0].is_contiguous()
    assert copied.tolist() == [[0, 1, 2], [0, 1, 2]]
