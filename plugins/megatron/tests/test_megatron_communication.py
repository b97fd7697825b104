"""The collectives of a training step, counted on a process group that exchanges nothing."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from collectives import Collectives
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlframework.algorithms.losses import NLLLoss
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_conformance import cases
from rlframework_megatron.worker import MegatronPolicyWorker

DISTRIBUTED = {"distributed_optimizer": True}
OVERLAPPED = DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.fixture
def group_of_four():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def collectives(path, rows, section):
    """Count the collectives of a step with microbatches of `rows` rows."""
    worker = MegatronPolicyWorker(
        {
            "model_name": str(path),
            "train_global_batch_size": 32,
            "train_micro_batch_size": rows,
            "batching": {"mode": "padded"},
        },
        cases.tokenizer(),
        init_reference_model=False,
        context=WorkerContext(world_size=4),
        backend_config=section,
    )
    try:
        worker.train(cases.batch(), NLLLoss())
        with Collectives() as counted:
            worker.train(cases.batch(), NLLLoss())
    finally:
        worker.shutdown()
    return counted.counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "reductions", "gathers"),
    [
        ({}, {"allreduce_coalesced_": 1}, {}),
        (DISTRIBUTED, {"reduce_scatter_tensor_coalesced_": 1}, {"allgather_into_tensor_coalesced_": 1}),
        (OVERLAPPED, {"reduce_scatter_tensor_coalesced_": 1}, {"allgather_into_tensor_coalesced_": 1}),
    ],
    ids=["plain", "distributed", "overlapped"],
)
def test_gradients_are_reduced_once_per_step(tmp_path, group_of_four, section, reductions, gathers):
    """And updated weights gathered once; the rest are numbers, such as the norm of the gradient."""
    path = cases.model("untied", tmp_path)
    one, four = (collectives(path, rows, section) for rows in (8, 2))
    assert one == four
    assert {name: number for name, number in four.items() if "coalesced" in name} == reductions | gathers
