"""A process that counts collectives: DeepSpeed keeps its groups in global variables, which other tests would notice."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from collectives import Collectives
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlframework.algorithms.losses import NLLLoss
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_conformance import cases
from rlframework_deepspeed.worker import DeepSpeedPolicyWorker

WORLD = 4


def count(model: Path, rows: tuple[int, ...]) -> None:
    """Print the collectives of an optimizer step, by stage and number of rows in a microbatch."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    for stage in range(4):
        found = [_collectives(model, stage, one) for one in rows]
        print(json.dumps(found))


def _collectives(model: Path, stage: int, rows: int) -> dict[str, int]:
    batch = cases.batch()
    worker = DeepSpeedPolicyWorker(
        {
            "model_name": str(model),
            "train_global_batch_size": WORLD * batch.size,
            "train_micro_batch_size": rows,
            "batching": {"mode": "padded"},
        },
        cases.tokenizer(),
        init_reference_model=False,
        context=WorkerContext(world_size=WORLD),
        backend_config={"zero_optimization": {"stage": stage}},
    )
    worker.train(batch, NLLLoss())
    with Collectives() as counted:
        worker.train(batch, NLLLoss())
    worker.shutdown()
    return dict(counted.counts)
