"""A process that works on the counting device, whose registration other tests in a process would notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import counting_device

from rlframework.algorithms.losses import NLLLoss
from rlframework.conformance import cases
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_dtensor.worker import DTensorPolicyWorker


def train(model: Path, mode: str, batches: list[Any], keys: dict[str, Any]) -> None:
    """Print, for one optimizer step per batch: what waited, the number of forwards, loss and gradient norm."""
    worker = make_worker(model, mode, batches[0].size, keys)
    for batch in batches:
        result = count(lambda batch=batch: worker.train(batch, NLLLoss()))
        assert result["grad_norm"] is not None
    worker.shutdown()


def score(model: Path, mode: str, batches: list[Any], keys: dict[str, Any]) -> None:
    """Print, for each batch: what waited in log-probabilities, top-k tokens, those of the reference, and evaluation."""
    worker = make_worker(model, mode, batches[0].size, keys)
    for batch in batches:
        for call in (
            lambda batch=batch: worker.get_logprobs(batch),
            lambda batch=batch: worker.get_topk_logits(batch, 3),
            lambda batch=batch: worker.get_reference_policy_logprobs(batch),
            lambda batch=batch: worker.train(batch, NLLLoss(), eval_mode=True),
        ):
            count(call)
    worker.shutdown()


def make_worker(model: Path, mode: str, rows: int, keys: dict[str, Any]) -> DTensorPolicyWorker:
    """A worker on the device."""
    counting_device.register()
    return DTensorPolicyWorker(
        {
            "model_name": str(model),
            "train_global_batch_size": rows,
            "train_micro_batch_size": 2,
            "logprob_batch_size": 2,
            "batching": {"mode": mode, "tokens": 40},
            **keys,
        },
        cases.tokenizer(),
        context=WorkerContext(rank=0, world_size=1, device=counting_device.NAME),
    )


def count(call: Callable[[], Any]) -> Any:
    """Run `call` and print what waited, the number of forwards and, of training, loss and norm."""
    with counting_device.counting() as counts:
        result = call()
    found = {"waits": counts.waits, "forwards": counts.operations["embedding"]}
    if "global_loss" in result:
        norm = result["grad_norm"]
        found |= {"loss": float(result["global_loss"][0]), "norm": None if norm is None else float(norm[0])}
    print(json.dumps(found))
    return result
