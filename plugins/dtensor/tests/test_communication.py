"""The collectives of a training step and their bytes, counted on a process group that exchanges nothing.

On GPUs the collectives of a layer overlap with the computation of its neighbors if there are few of them, and large.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlframework.algorithms.losses import NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.huggingface.model_directories import make_llama
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_conformance import cases
from rlframework_dtensor.worker import DTensorPolicyWorker

WORKERS, LAYERS, HIDDEN, MLP, HEADS, KV_HEADS = 4, 3, 32, 64, 4, 2
SIZES = {"hidden": HIDDEN, "intermediate": MLP, "layers": LAYERS, "heads": HEADS, "kv_heads": KV_HEADS}
ROWS, LENGTH, MICROBATCHES = 2, 12, 2
"""Of each microbatch, and their number on each worker."""

HEAD_SIZE = HIDDEN // HEADS
MATRICES = 2 * HIDDEN * HEAD_SIZE * (HEADS + KV_HEADS) + 3 * HIDDEN * MLP
"""Weights of a layer that tensor parallelism shards; two norms of `HIDDEN` are whole."""

NAMES = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
}


@dataclass(frozen=True)
class Collective:
    """A collective; `size`: bytes of the whole tensor that is gathered or reduced."""

    name: str
    dtype: torch.dtype
    size: int
    backward: bool


class Collectives(TorchDispatchMode):
    """Counts collectives. `CommDebugMode` does so by hooks of modules, whose outputs FSDP warns of."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Collective] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        library, _, name = func._schema.name.partition("::")
        if library in ("c10d", "_c10d_functional") and name in NAMES:
            tensors = [value for value in tree_leaves((args, result)) if isinstance(value, torch.Tensor)]
            largest = max(tensors, key=lambda tensor: tensor.numel())
            backward = torch._C._current_graph_task_id() != -1
            self.counts[Collective(NAMES[name], largest.dtype, largest.nbytes, backward)] += 1
        return result

    def number(self, name, dtype, size, backward=None):
        """The number of such collectives, in both passes or in one."""
        wanted = [Collective(name, dtype, size, one) for one in ((False, True) if backward is None else (backward,))]
        return sum(self.counts[one] for one in wanted)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("model"), cases.tokenizer(), **SIZES)


@pytest.fixture(autouse=True)
def group_of_four():
    dist.init_process_group("fake", rank=0, world_size=WORKERS, store=FakeStore())
    yield
    dist.destroy_process_group()


def collectives(model, parallelism=None, checkpointing=False, **section):
    """Count the collectives of a step in bfloat16."""
    parallelism = parallelism or {}
    data = WORKERS // parallelism.get("tensor", 1) // parallelism.get("context", 1)
    rows = ROWS * MICROBATCHES
    worker = DTensorPolicyWorker(
        {
            "model_name": str(model),
            "train_global_batch_size": data * rows,
            "train_micro_batch_size": ROWS,
            "precision": "bfloat16",
            "batching": {"mode": "padded"},
            "parallelism": parallelism,
            "activation_checkpointing": checkpointing,
        },
        cases.tokenizer(),
        context=WorkerContext(rank=0, world_size=WORKERS),
        backend_config=section,
    )
    generator = torch.Generator().manual_seed(0)
    batch = BatchedDataDict(
        {
            "input_ids": torch.randint(3, 20, (rows, LENGTH), generator=generator),
            "input_lengths": torch.full((rows,), LENGTH),
            "token_mask": torch.ones(rows, LENGTH),
            "sample_mask": torch.ones(rows),
        }
    )
    worker.train(batch, NLLLoss())
    with Collectives() as counted:
        worker.train(batch, NLLLoss())
    worker.shutdown()
    return counted


EACH = LAYERS * MICROBATCHES
"""Layers times microbatches."""

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS = ROWS * LENGTH
ACTIVATIONS = 2 * TOKENS * HIDDEN
AT_HEAD = 2 * ROWS * (LENGTH - 1) * HIDDEN  # no log-probability at the first token of a row
LAYOUTS = {
    "data": {},
    "tensor": {"tensor": 2},
    "tensor, sequence": {"tensor": 2, "sequence": True},
    "context": {"context": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_gathered_in_bf16_once_a_pass_and_gradients_reduced_once_in_fp32(model, layout, checkpointing):
    """FSDP: one collective of a layer's weights in the forward, two in the backward, also where it recomputes."""
    counted = collectives(model, LAYOUTS[layout], checkpointing)
    layer = MATRICES // LAYOUTS[layout].get("tensor", 1) + 2 * HIDDEN
    assert counted.number("all-gather", BF16, 2 * layer, backward=False) == EACH
    assert counted.number("all-gather", BF16, 2 * layer, backward=True) == EACH
    assert counted.number("reduce-scatter", FP32, 4 * layer) == EACH


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tensor_parallelism_sums_activations_twice_a_layer_and_pass(model, checkpointing):
    """Of `2 * tokens * hidden` bytes: after attention and MLP, and in the backward before them.

    A recomputed forward sums those of the attention again. The embedding's values, and the gradient of the hidden
    states that the head reads, are summed once a microbatch.
    """
    counted = collectives(model, LAYOUTS["tensor"], checkpointing)
    assert counted.number("all-reduce", BF16, ACTIVATIONS, backward=False) == 2 * EACH + MICROBATCHES
    assert counted.number("all-reduce", BF16, ACTIVATIONS, backward=True) == (3 if checkpointing else 2) * EACH
    assert counted.number("all-reduce", BF16, AT_HEAD, backward=True) == MICROBATCHES


@pytest.mark.slow
def test_sequence_parallelism_gathers_and_scatters_in_place_of_each_sum(model):
    """A gather and a scatter move as many bytes as one sum.

    The head gathers its hidden states, and the embedding the gradient of its values. Each norm's gradient, of this
    worker's tokens, is summed too: a message of `2 * hidden` bytes.
    """
    counted = collectives(model, LAYOUTS["tensor, sequence"])
    for backward in (False, True):
        assert counted.number("all-gather", BF16, ACTIVATIONS, backward) == 2 * EACH + MICROBATCHES
        assert counted.number("reduce-scatter", BF16, ACTIVATIONS, backward) == 2 * EACH
    assert counted.number("all-reduce", BF16, ACTIVATIONS) == MICROBATCHES
    assert counted.number("all-reduce", BF16, AT_HEAD, backward=True) == MICROBATCHES
    assert counted.number("all-reduce", BF16, 2 * HIDDEN, backward=True) == (2 * LAYERS + 1) * MICROBATCHES


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_context_parallelism_gathers_keys_and_values_together(model, checkpointing):
    """One gather a layer, again where the backward recomputes it, and one scatter of their gradients."""
    counted = collectives(model, LAYOUTS["context"], checkpointing)
    size = 2 * TOKENS * KV_HEADS * 2 * HEAD_SIZE
    assert counted.number("all-gather", BF16, size, backward=False) == EACH
    assert counted.number("all-gather", BF16, size, backward=True) == (EACH if checkpointing else 0)
    assert counted.number("reduce-scatter", BF16, size, backward=True) == EACH


@pytest.mark.slow
def test_gradients_are_reduced_once_per_step_on_request(model):
    counted = collectives(model, reduce_gradients="step")
    assert counted.number("reduce-scatter", FP32, 4 * (MATRICES + 2 * HIDDEN)) == LAYERS
    assert counted.number("all-gather", BF16, 2 * (MATRICES + 2 * HIDDEN)) == 2 * EACH


@pytest.mark.slow
def test_replicas_sum_their_shards_once_per_step(model):
    """Shards of half the gradient each, of the layers and of the rest of the model."""
    counted = collectives(model, replicate=2)
    whole = 4 * (MATRICES + 2 * HIDDEN)
    assert counted.number("reduce-scatter", FP32, whole) == EACH
    assert counted.number("all-reduce", FP32, whole // 2) == LAYERS


@pytest.mark.slow
def test_embedding_and_head_are_gathered_and_reduced_on_their_own_unless_tied(tmp_path, model):
    untied = make_llama(tmp_path, cases.tokenizer(), **SIZES, tied=False)
    for path, units in ((model, 1), (untied, 3)):  # beside the layers: the rest; embedding, head and last norm
        counts = collectives(path, reduce_gradients="step").counts
        assert sum(number for one, number in counts.items() if one.name == "reduce-scatter") == LAYERS + units
