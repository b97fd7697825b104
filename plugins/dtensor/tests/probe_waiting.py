"""A process that trains on the counting device, whose registration other tests in a process would notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import counting_device

from rlframework.algorithms.losses import NLLLoss
from rlframework.conformance import cases
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_dtensor.worker import DTensorPolicyWorker


def train(model: Path, mode: str, batches: list[Any]) -> None:
    """Print, for one optimizer step per batch: what waited, the number of forwards, loss, gradient norm, times."""
    counting_device.register()
    worker = DTensorPolicyWorker(
        {
            "model_name": str(model),
            "train_global_batch_size": batches[0].size,
            "train_micro_batch_size": 2,
            "batching": {"mode": mode, "tokens": 40},
        },
        cases.tokenizer(),
        context=WorkerContext(rank=0, world_size=1, device=counting_device.NAME),
    )
    for batch in batches:
        with counting_device.counting() as counts:
            result = worker.train(batch, NLLLoss())
        found = {"waits": counts.waits, "forwards": counts.operations["embedding"]}
        assert result["grad_norm"] is not None
        found |= {"loss": float(result["global_loss"][0]), "norm": float(result["grad_norm"][0])}
        print(json.dumps(found | {"times": result["times"]}))
    worker.shutdown()
