"""Checkpoints of a worker on a GPU: shards are copied to RAM before the next step, and read by a worker on the CPU."""

from __future__ import annotations

import pytest
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.trained_weights import open_saved
from rlframework_dtensor.worker import DTensorPolicyWorker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def read(folder) -> dict[str, torch.Tensor]:
    with open_saved(folder) as saved:
        return {name: saved[name].clone() for name in saved}


def test_an_asynchronous_save_is_of_the_step_that_it_began_at(model_path, tokenizer, batches, tmp_path):
    config = {"model_name": str(model_path), "train_global_batch_size": 8, "optimizer": {"lr": 1e-2}}
    first, second = batches(2)

    def paths(name):
        return str(tmp_path / name / "model"), str(tmp_path / name / "optimizer")

    worker = DTensorPolicyWorker(config, tokenizer, context=WorkerContext(device="cuda"))
    try:
        worker.train(first, NLLLoss())
        worker.save_checkpoint(*paths("portable"))
        worker.save_checkpoint(*paths("sharded"), form="sharded", asynchronous=True)
        worker.train(second, NLLLoss())
        worker.finish_checkpoint()
        for portable, sharded in zip(paths("portable"), paths("sharded"), strict=True):
            wanted, found = read(portable), read(sharded)
            assert sorted(found) == sorted(wanted)
            assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    finally:
        worker.shutdown()
    on_cpu = DTensorPolicyWorker(config, tokenizer)
    try:
        on_cpu.load_checkpoint(*paths("sharded"))
        wanted = read(paths("portable")[0])
        assert all(torch.equal(weight, wanted[name]) for name, weight in on_cpu.gather_weights(on_cpu.weight_specs()))
    finally:
        on_cpu.shutdown()
