"""Offloading, as far as a CPU can show it: freed memory is restored under all its views.

The moves between a GPU and CPU memory themselves are in test_megatron_gpu.py.
"""

from __future__ import annotations

import pytest
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.host_buffers import HostBuffers
from rlframework_conformance import cases
from rlframework_megatron.offload import OffloadableMemory, main_weights, move_state, storages
from rlframework_megatron.worker import MegatronPolicyWorker

DISTRIBUTED = {"distributed_optimizer": True}
META = torch.device("meta")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return cases.model("tied", tmp_path_factory.mktemp("models"))


@pytest.fixture
def make_worker(path):
    made = []

    def make(section, **keys):
        worker = MegatronPolicyWorker(
            {"model_name": str(path), "train_global_batch_size": 8, "optimizer": {"lr": 1e-2}, **keys},
            load_tokenizer(str(path)),
            init_reference_model=False,
            context=WorkerContext(),
            backend_config=section,
        )
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.shutdown()


def weights_of(worker):
    return {name: weight.clone() for name, weight in worker.engine.gather_weights(worker.engine.weight_specs())}


def test_offloaded_memory_is_restored_under_every_view():
    whole, dropped = torch.arange(6.0), torch.ones(3)
    half, pair = whole[3:], dropped.view(3, 1)
    memory = OffloadableMemory(HostBuffers())
    assert memory.offload([whole, half], [pair]) == 24
    assert memory.is_offloaded
    assert memory.offload([whole], [dropped]) == 0  # already offloaded
    assert whole.untyped_storage().nbytes() == dropped.untyped_storage().nbytes() == 0
    assert memory.onload() == 24
    assert not memory.is_offloaded
    assert memory.onload() == 0
    assert half.tolist() == [3.0, 4.0, 5.0]
    assert pair.flatten().tolist() == [0.0] * 3
    whole[4] = 7.0
    assert half[1] == 7.0


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("section", [{}, DISTRIBUTED], ids=["plain", "distributed"])
def test_training_continues_to_the_bit_after_offloading(make_worker, section, precision):
    """Parameters, buckets and the optimizer's shards are views of memory that was freed and reallocated."""
    stays, leaves = (make_worker(section, precision=precision) for _ in range(2))
    for seed in range(2):
        for worker in (stays, leaves):
            worker.train(cases.batch(seed=seed), NLLLoss())
        moves, memory = leaves.engine._offloader, OffloadableMemory(HostBuffers())
        held, gradients = storages(moves.weights()), storages(moves.gradients())
        size = sum(one.nbytes() for one in held)
        assert size >= sum(parameter.nbytes for parameter in leaves.engine.chunks[0].parameters())
        assert memory.offload(moves.weights(), moves.gradients()) == size
        assert sum(one.nbytes() for one in (*held, *gradients)) == 0
        assert memory.onload() == size
    for name, weight in weights_of(stays).items():
        assert torch.equal(weight, weights_of(leaves)[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("section", [{}, DISTRIBUTED], ids=["plain", "distributed"])
def test_the_optimizer_has_moments_and_the_fp32_weights_that_are_no_memory_of_the_model(
    make_worker, section, precision
):
    """Two moments per weight; in bfloat16 also fp32 weights. 'meta' stands for another device."""
    worker = make_worker(section, precision=precision)
    worker.train(cases.batch(), NLLLoss())
    (optimizer,), weights = worker.engine._optimizer.optimizers, storages(worker.engine._offloader.weights())
    numbers = sum(parameter.numel() for parameter in worker.engine.chunks[0].parameters())
    own = main_weights(optimizer.optimizer, weights)
    assert sum(main.numel() for main in own) == (numbers if precision == "bfloat16" else 0)
    # a `meta` tensor cannot replace another's data, so the fp32 weights are counted as the model's
    assert move_state([optimizer], META, HostBuffers(), of_model=[*weights, *storages(own)]) == 2 * 4 * numbers
    assert all(state["exp_avg"].is_meta and state["step"].is_cpu for state in optimizer.optimizer.state.values())
    assert move_state([optimizer], META, HostBuffers(), of_model=[*weights, *storages(own)]) == 0


@pytest.mark.slow
def test_on_a_cpu_nothing_moves(make_worker):
    worker = make_worker(DISTRIBUTED)
    worker.train(cases.batch(), NLLLoss())
    assert worker.offload_after_refit() == {"model": 0, "optimizer": 0}
    assert all(one.nbytes() for one in storages(worker.engine._offloader.weights()))
    assert worker.prepare_for_training() == {"model": 0, "optimizer": 0}
