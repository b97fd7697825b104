"""A process that scores on the counting device, whose registration other tests in a process would notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import counting_device

from rlframework.algorithms.losses import NLLLoss
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_conformance import cases
from rlframework_dtensor.worker import DTensorPolicyWorker


def score(model: Path, mode: str, batch: Any) -> None:
    """Print, by call: what waited, the number of forwards, and of an evaluation the loss."""
    counting_device.register()
    worker = DTensorPolicyWorker(
        {
            "model_name": str(model),
            "train_global_batch_size": batch.size,
            "train_micro_batch_size": 2,
            "logprob_batch_size": 2,
            "batching": {"mode": mode, "tokens": 40},
        },
        cases.tokenizer(),
        context=WorkerContext(rank=0, world_size=1, device=counting_device.NAME),
    )
    calls = {
        "get_logprobs": lambda: worker.get_logprobs(batch),
        "get_topk_logits": lambda: worker.get_topk_logits(batch, 3),
        "get_reference_policy_logprobs": lambda: worker.get_reference_policy_logprobs(batch),
        "evaluate": lambda: worker.train(batch, NLLLoss(), eval_mode=True),
    }
    found = {}
    for name, call in calls.items():
        with counting_device.counting() as counts:
            result = call()
        found[name] = {"waits": counts.waits, "forwards": counts.operations["embedding"]}
    found["evaluate"]["loss"] = float(result["global_loss"][0])
    print(json.dumps(found))
    worker.shutdown()
