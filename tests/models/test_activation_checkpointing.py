"""Activation checkpointing: what it computes twice and keeps, counted; its results are those without it."""

from __future__ import annotations

from collections import Counter
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig

from rlframework.base.errors import NotSupported
from rlframework.models.activation_checkpointing import checkpoint_activations, selective_contexts

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, LAYERS, VOCABULARY = 32, 64, 4, 2, 3, 50
KEYS = HIDDEN // HEADS * KV_HEADS
TOKENS = 24
CONFIG = LlamaConfig(
    hidden_size=HIDDEN,
    intermediate_size=INTERMEDIATE,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    vocab_size=VOCABULARY,
    use_cache=False,
)


class Recorder(TorchDispatchMode):
    """Counts operators, and knows which of their results are still in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.storages: dict[int, ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name().removeprefix("aten::")] += 1
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[id(storage)] = ref(storage)
        return result

    def bytes_in_memory(self) -> int:
        return sum(storage.nbytes() for one in self.storages.values() if (storage := one()) is not None)


def step(mode):
    """One step in `mode`: the operators of forward and backward, what the forward left in memory, the gradients."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="sdpa").train()
    if mode is not None:
        checkpoint_activations(model, mode)
    ids = torch.arange(TOKENS)[None] % VOCABULARY
    with Recorder() as recorder:
        loss = model(ids).logits.square().mean()
        kept = recorder.bytes_in_memory()
        loss.backward()
    return recorder.counts, kept, [parameter.grad for parameter in model.parameters()]


@pytest.fixture(scope="module")
def steps():
    return {mode: step(mode) for mode in (None, "selective", "full")}


def attention(counts):
    return sum(count for name, count in counts.items() if "attention" in name and "backward" not in name)


def test_gradients_are_those_without_checkpointing_bit_for_bit(steps):
    for mode in ("selective", "full"):
        for gradient, plain in zip(steps[mode][2], steps[None][2], strict=True):
            assert torch.equal(gradient, plain)


def test_selective_repeats_no_matrix_product_and_no_attention_but_the_activation_functions(steps):
    plain, selective = steps[None][0], steps["selective"][0]
    assert plain["mm"] == 3 * (7 * LAYERS + 1)  # q, k, v, o, gate, up, down and the head, each with two gradients
    assert selective["mm"] == plain["mm"]
    assert attention(selective) == attention(plain) == LAYERS
    assert selective["silu"] == 2 * plain["silu"]


def test_full_repeats_the_forward_of_blocks(steps):
    plain, full = steps[None][0], steps["full"][0]
    assert full["mm"] - plain["mm"] == 6 * LAYERS  # torch stops before the last product of a block
    assert attention(full) == 2 * LAYERS
    assert full["silu"] == 2 * plain["silu"]


def test_selective_keeps_the_results_of_products_and_attention_beside_what_full_keeps(steps):
    plain, selective, full = (steps[mode][1] for mode in (None, "selective", "full"))
    products = HIDDEN + 2 * KEYS + HIDDEN + 2 * INTERMEDIATE + HIDDEN  # of each token: q, k and v, o, gate and up, down
    of_attention = HIDDEN + HEADS  # its result, and the logarithm of its denominators
    assert selective - full == 4 * TOKENS * LAYERS * (products + of_attention)
    assert full < selective < plain


@pytest.fixture
def one_process():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def double(product):
    product.detach().mul_(2)


def reduce(product):
    """A sum over a single worker. torch counts no change, although several workers would change the values."""
    dist.all_reduce(product.detach())


@pytest.mark.parametrize("change", [double, reduce])
def test_a_kept_result_that_was_changed_in_place_is_computed_again(change, one_process):
    weight = torch.ones(2, 2, requires_grad=True)

    def block(inputs):
        product = inputs @ weight
        change(product)
        return product.exp()

    with Recorder() as recorder:
        checkpoint(block, torch.ones(3, 2), use_reentrant=False, context_fn=selective_contexts).sum().backward()
    assert recorder.counts["mm"] == 3  # forward, recomputation and the gradient of the weight
    factor = 2 if change is double else 1
    assert torch.equal(weight.grad, torch.full((2, 2), 3 * torch.tensor(2.0 * factor).exp().item()))


def test_an_operator_out_of_order_is_an_error():
    weight, calls = torch.ones(2, 2, requires_grad=True), []

    def block(inputs):
        calls.append(None)
        return (inputs @ weight if len(calls) == 1 else torch.addmm(inputs, inputs, weight)).exp()

    loss = checkpoint(block, torch.ones(2, 2), use_reentrant=False, context_fn=selective_contexts).sum()
    with pytest.raises(NotSupported, match=r"aten.addmm.default.*activation_checkpointing to full"):
        loss.backward()


def test_the_recomputation_may_run_operators_that_the_forward_did_not():
    """As an engine that gathers weights in hooks."""
    weight, calls = torch.ones(2, 2, requires_grad=True), []

    def block(inputs):
        calls.append(torch.empty(len(calls)).add(1))
        return (inputs @ weight).exp()

    checkpoint(block, torch.ones(3, 2), use_reentrant=False, context_fn=selective_contexts).sum().backward()
    assert len(calls) == 2
    assert torch.equal(weight.grad, torch.full((2, 2), 3 * torch.tensor(2.0).exp().item()))
