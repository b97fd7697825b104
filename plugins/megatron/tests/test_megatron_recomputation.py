"""`policy.activation_checkpointing`: the bytes kept until the backward, and the matrix products computed again."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlframework.algorithms.losses import NLLLoss
from rlframework_conformance import cases
from rlframework_megatron.worker import MegatronPolicyWorker

PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def step(path, mode):
    """Train a step of one microbatch: bytes kept when the backward begins, matrix products, and the weights after."""
    worker = MegatronPolicyWorker(
        {
            "model_name": str(path),
            "train_global_batch_size": 8,
            "train_micro_batch_size": 8,
            "batching": {"mode": "padded"},
            "precision": "bfloat16",
            "activation_checkpointing": mode,
        },
        cases.tokenizer(),
    )
    storages = {}
    known = {one.untyped_storage().data_ptr() for one in worker.engine.chunks[0].parameters()}
    bytes_kept = []

    class Loss(NLLLoss):
        def __call__(self, *args, **kwargs):
            bytes_kept.append(sum(one.nbytes() for one in storages.values() if one.data_ptr() not in known))
            return super().__call__(*args, **kwargs)

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), Operators() as operators:
            worker.train(cases.batch(), Loss())
        weights = {name: weight.clone() for name, weight in worker.engine.gather_weights(worker.engine.weight_specs())}
    finally:
        worker.shutdown()
    return bytes_kept[0], sum(operators.counts[name] for name in PRODUCTS), weights


@pytest.mark.slow
def test_selective_recomputes_no_matrix_product(tmp_path):
    path = cases.model("norms_of_heads", tmp_path)
    found = {mode: step(path, mode) for mode in (False, "selective", "full")}
    kept, products = ({mode: one[number] for mode, one in found.items()} for number in (0, 1))
    print(kept, products)
    assert kept["full"] < kept["selective"] < 0.6 * kept[False]
    assert products["selective"] == products[False] < products["full"]
    for mode in ("selective", "full"):
        assert all(torch.equal(found[mode][2][name], weight) for name, weight in found[False][2].items())
