"""Training waits for the device once in an optimizer step, counted on a device that computes on the CPU."""

from __future__ import annotations

import counting_device
import pytest
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.conformance import cases
from rlframework.conformance.oracle import Oracle
from rlframework.huggingface.model_directories import make_llama
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_dtensor.worker import DTensorPolicyWorker


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    counting_device.register()
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden": 32, "intermediate": 64, "layers": 2, "heads": 4, "kv_heads": 2}
    return make_llama(path, cases.tokenizer(), **sizes, tied=False, init_std=0.2)


@pytest.mark.parametrize("mode", ["packed", "dynamic", "padded"])
def test_a_step_waits_once_whatever_the_number_of_microbatches(model, batches, mode):
    worker = DTensorPolicyWorker(
        {
            "model_name": str(model),
            "train_global_batch_size": 8,
            "train_micro_batch_size": 2,
            "batching": {"mode": mode, "tokens": 40},
        },
        cases.tokenizer(),
        context=WorkerContext(rank=0, world_size=1, device=counting_device.NAME),
    )
    oracle = Oracle(model, lr=worker.engine.config.optimizer.lr)
    for batch in batches(2):
        with counting_device.counting() as counts:
            result = worker.train(batch, NLLLoss())
        expected = oracle.step(batch, "nll")
        assert float(result["grad_norm"][0]) == pytest.approx(expected.grad_norm, rel=1e-5)
        assert counts.operations["embedding"] > 1  # microbatches
        assert len(counts.waits) == 1, "\n".join(counts.waits)
    worker.shutdown()
