"""Rows with prompts of their own beside rows that share prompts, in packed rows; linear layers with packed weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from causal_kinds import KINDS, tiny_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlframework.generation.packed_linears import PackedLinears, computed_rows, shows_columns
from rlframework_transformers.packed_rows import PackedRows

OWN, SHARED = [[3, 9, 4], [7, 2, 13, 5, 5, 6, 8], [6]], [[8, 2, 11, 3, 4], [5, 1]]


class Rows:
    """Packed rows, each beside all of its tokens."""

    def __init__(self, model: Any) -> None:
        self.model, self.ids = model, list[list[int]]()
        self.forward = PackedRows(model, 0, torch.device("cpu"))

    def join(self, prompts: list[list[int]]) -> Tensor:
        begin = self.forward.join if self.ids else self.forward.start
        self.ids += prompts
        logits = begin([torch.tensor(prompt) for prompt in prompts], 9)
        assert logits is not None
        return logits

    def keep(self, rows: list[int]) -> None:
        self.ids = [self.ids[row] for row in rows]
        self.forward.keep(torch.tensor(rows))

    def require(self, logits: Tensor, ids: list[list[int]]) -> None:
        """Compare with whole forwards of each row."""
        expected = torch.stack([self.model(torch.tensor([row])).logits[0, -1] for row in ids])
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)

    def steps(self, count: int) -> None:
        for step in range(count):
            tokens = [(3 * row + 5 * step) % 13 for row in range(len(self.ids))]
            self.ids = [[*row, token] for row, token in zip(self.ids, tokens, strict=True)]
            self.require(self.forward.advance(torch.tensor(tokens)), self.ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral"])
@torch.no_grad()
def test_rows_with_own_and_with_shared_prompts_are_those_of_whole_forwards(kind: str) -> None:
    rows = Rows(tiny_model(KINDS[kind]))
    rows.require(rows.join(OWN), OWN)
    rows.steps(3)
    rows.require(rows.join([*SHARED, *SHARED]), [*SHARED, *SHARED])
    rows.steps(4)
    for row in (1, 3, 5):  # of an own prompt, of a shared one, and of the shared one that this row has now too
        kept = rows.forward.tokens_of(row)
        assert {tensor.shape[1] for layer in kept for tensor in layer} == {len(rows.ids[row])}
    rows.keep([6, 1, 2, 4])
    rows.steps(2)
    rows.keep([2, 1])
    rows.require(rows.join(OWN[:1]), OWN[:1])
    rows.steps(3)
    again = [rows.ids[1]]
    rows.require(rows.join([again[0], again[0]]), [again[0], again[0]])
    rows.steps(2)


@pytest.mark.parametrize("found", [{"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, None])
@torch.no_grad()
def test_products_in_bfloat16_are_fp32_sums_rounded_once(
    found: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without instructions for bfloat16; errors of fp32 sums are far below a unit in the last place."""
    if found is not None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    torch.manual_seed(0)
    layer, inputs = nn.Linear(64, 48).bfloat16(), torch.randn(5, 64).bfloat16()
    exact = inputs.double() @ layer.weight.double().T + layer.bias.double()
    packed = PackedLinears()
    with packed.used(layer, pack=True):
        product = layer(inputs)
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.double(), exact, rtol=2**-8, atol=1e-6)
    if found is not None:
        assert packed.drop() == 4 * layer.weight.numel()


class SizesOfProducts(TorchDispatchMode):
    """Collects the numbers of rows of products with packed weights: a kernel is kept for each."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_linear_pointwise" in str(func):
            self.found.add(args[0].shape[0])
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_rows_are_computed_in_few_sizes() -> None:
    """A run has rows of any number: without this, memory grows by a kernel for each."""
    layer, sizes = nn.Linear(16, 8), SizesOfProducts()
    counts = [*range(1, 70), 127, 128, 129, 1000]
    with sizes, PackedLinears().used(layer, pack=True):
        for count in counts:
            inputs = torch.randn(1, count, 16)
            torch.testing.assert_close(layer(inputs), inputs @ layer.weight.T + layer.bias, atol=1e-6, rtol=1e-5)
    assert sizes.found == {*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), 72, 128, 144, 1024}
    assert len({computed_rows(count) for count in range(1, 4097)}) == 80
    assert all(count <= computed_rows(count) <= 1.125 * count for count in range(1, 4097))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_of_other_weights_is_told_apart_by_its_columns(dtype: torch.dtype) -> None:
    """Each column differs by the last bit of one weight."""
    weight = torch.randn(49, 64).to(dtype)
    packed = torch.nn.functional.pad(weight, (0, 0, 0, 15)).clone()  # a vocabulary that is padded
    assert shows_columns(lambda rows: rows @ packed.T, weight)
    bits = weight.clone().view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[7] += 1
    assert not shows_columns(lambda rows: rows @ bits.view(dtype).T, weight)
