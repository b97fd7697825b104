"""A process that trains on the counting device, whose registration other tests in a process would notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import counting_device
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.conformance import cases
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_dtensor.worker import DTensorPolicyWorker


def build(model: Path, mode: str, batch: Any) -> DTensorPolicyWorker:
    """A worker on the counting device."""
    counting_device.register()
    return DTensorPolicyWorker(
        {
            "model_name": str(model),
            "train_global_batch_size": batch.size,
            "train_micro_batch_size": 2,
            "batching": {"mode": mode, "tokens": 40},
        },
        cases.tokenizer(),
        context=WorkerContext(rank=0, world_size=1, device=counting_device.NAME),
    )


def train(model: Path, mode: str, batches: list[Any]) -> None:
    """Print, for one optimizer step per batch: what waited, the number of forwards, loss and gradient norm."""
    worker = build(model, mode, batches[0])
    for batch in batches:
        with counting_device.counting() as counts:
            result = worker.train(batch, NLLLoss())
        found = {"waits": counts.waits, "forwards": counts.operations["embedding"]}
        assert result["grad_norm"] is not None
        found |= {"loss": float(result["global_loss"][0]), "norm": float(result["grad_norm"][0])}
        print(json.dumps(found))
    worker.shutdown()


def move(model: Path, batch: Any) -> None:
    """Print, for two moves to the CPU and back: bytes, what waited each way, and the addresses in CPU memory."""
    worker = build(model, "packed", batch)
    worker.train(batch, NLLLoss())
    before = weights(worker)
    for _ in range(2):
        with counting_device.counting() as there:
            moved = worker.offload_after_refit()
        states = worker.engine._optimizer.state.values()
        addresses = [value.data_ptr() for state in states for value in state.values()]
        addresses += [parameter.data_ptr() for parameter in worker.engine.model.parameters()]
        with counting_device.counting() as back:
            worker.prepare_for_training()
        print(json.dumps({"moved": moved, "there": there.waits, "back": back.waits, "addresses": addresses}))
    assert all(torch.equal(value, before[name]) for name, value in weights(worker).items())
    worker.shutdown()


def swap(model: Path, batch: Any) -> None:
    """Print what waited in two swaps of the reference and the policy."""
    worker = build(model, "packed", batch)
    start = weights(worker)
    worker.train(batch, NLLLoss())
    trained = weights(worker)
    for _ in range(2):
        with counting_device.counting() as counts, worker.use_reference_model():
            waits, counts.waits = counts.waits, []
            assert all(torch.equal(value, start[name]) for name, value in weights(worker).items())
            counts.waits = waits
        print(json.dumps(counts.waits))
        assert all(torch.equal(value, trained[name]) for name, value in weights(worker).items())
    worker.shutdown()


def weights(worker: DTensorPolicyWorker) -> dict[str, torch.Tensor]:
    """Copies of the weights on the CPU."""
    return {name: parameter.detach().cpu().clone() for name, parameter in worker.engine.model.named_parameters()}
