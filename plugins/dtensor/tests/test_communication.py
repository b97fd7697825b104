"""The collectives of a training step, counted on a process group that exchanges nothing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from rlframework.algorithms.losses import NLLLoss
from rlframework.conformance import cases
from rlframework.huggingface.model_directories import make_llama
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_dtensor.worker import DTensorPolicyWorker

LAYERS = 3


class Collectives(TorchDispatchMode):
    """Counts collectives by name. `CommDebugMode` does so by hooks of modules, whose outputs FSDP warns of."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("c10d::"):
            self.counts[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return make_llama(path, cases.tokenizer(), hidden=32, intermediate=64, layers=LAYERS, heads=4, kv_heads=2)


@pytest.fixture
def group_of_four():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def collectives(model, batch, **section):
    """Count the collectives of a step with microbatches of two rows."""
    worker = DTensorPolicyWorker(
        {
            "model_name": str(model),
            "train_global_batch_size": 4 * batch.size,
            "train_micro_batch_size": 2,
            "batching": {"mode": "padded"},
        },
        cases.tokenizer(),
        context=WorkerContext(rank=0, world_size=4),
        backend_config=section,
    )
    worker.train(batch, NLLLoss())
    with Collectives() as counted:
        worker.train(batch, NLLLoss())
    worker.shutdown()
    return counted.counts


def test_gradients_are_reduced_once_per_step_on_request(model, batches, group_of_four):
    (batch,) = batches(1)
    each, once = collectives(model, batch), collectives(model, batch, reduce_gradients="step")
    units = LAYERS + 1  # the blocks, and the rest of the model
    microbatches, remainder = divmod(each["_reduce_scatter_base_"], units)
    assert microbatches > 1
    assert not remainder
    assert once["_reduce_scatter_base_"] == units
    assert once["_allgather_base_"] == each["_allgather_base_"] <= 2 * units * microbatches


def test_replicas_are_reduced_once_per_step(model, batches, group_of_four):
    (batch,) = batches(1)
    sharded, replicated = collectives(model, batch), collectives(model, batch, replicate=2)
    assert replicated["_reduce_scatter_base_"] == sharded["_reduce_scatter_base_"]
    assert replicated["allreduce_"] - sharded["allreduce_"] == LAYERS + 1


def test_embedding_and_head_are_gathered_and_reduced_on_their_own_unless_tied(tmp_path, batches, group_of_four):
    sizes = {"hidden": 32, "intermediate": 64, "layers": LAYERS, "heads": 4, "kv_heads": 2}
    untied = make_llama(tmp_path, cases.tokenizer(), **sizes, tied=False)
    (batch,) = batches(1)
    assert collectives(untied, batch, reduce_gradients="step")["_reduce_scatter_base_"] == LAYERS + 3
