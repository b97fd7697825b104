"""Context parallelism finds a rank's head positions without waiting for the device."""

from __future__ import annotations

import json
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from probe_forked import run_forked


def positions_of_rank_zero() -> None:
    """Print the head positions and targets that rank 0 of 2 has of a packed row, and what waited."""
    import counting_device
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig

    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.models.forward import ContextParallel
    from rlframework.policy.microbatches.data_processor import make_microbatch
    from rlframework.policy.microbatches.on_demand import to_device
    from rlframework.policy.microbatches.shapes import Padding

    counting_device.register()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    rows = {"input_ids": torch.arange(16).view(2, 8), "input_lengths": torch.tensor([8, 3])}
    host = make_microbatch(
        BatchedDataDict(rows), torch.tensor([0, 1]), packed=True, positions="all", padding=Padding(4)
    )
    given = []

    @contextmanager
    def computing(*arguments):
        given.extend(arguments)
        yield

    def model(input_ids, **_):
        given.append(input_ids)
        return SimpleNamespace(logits=given[1].float())

    model.config = LlamaConfig()
    moved = to_device(host, torch.device(counting_device.NAME, 0))
    with counting_device.counting() as counts:
        values = ContextParallel(dist.group.WORLD).forward(model, SimpleNamespace(computing=computing), moved, None)
    _, positions, targets, input_ids = given
    print(json.dumps([counts.waits, len(values), positions.tolist(), targets.tolist(), input_ids.tolist()]))


def test_rank_zero_gets_the_ends_of_the_row_without_waiting():
    """Rows 0-7 and 8-10, padded to 12: rank 0 has columns 0-2 and 9-11, and at 0, 1, 2 and 9 the head predicts."""
    done = run_forked(positions_of_rank_zero)
    assert done.returncode == 0, done.stderr
    waits, values, positions, targets, input_ids = json.loads(done.stdout)
    assert waits == []
    assert input_ids == [[0, 1, 2, 9, 10, 0]]
    assert positions == [0, 1, 2, 3]
    assert targets == [1, 2, 3, 10]
    assert values == 9  # of both ranks
