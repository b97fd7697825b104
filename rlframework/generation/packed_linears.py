"""Linear layers of a model on a CPU with their weights in the order in which oneDNN multiplies them.

The small products of decoding take half the time or less where torch's own are slow: 32 rows by 576 x 1536 in fp32
0.40 ms instead of 0.82 on an AMD EPYC, but 0.59 instead of 0.65 on an Intel Xeon. The copies take the memory of the
linear layers' weights once more, and the time of one to two decoding steps to make.

Without instructions for bfloat16, oneDNN needs three times as long for a product in it as for one in fp32. There the
copies are in fp32, twice the memory of the weights, and products are rounded to bfloat16 afterwards: what a product in
bfloat16 is, up to the order of the sum, because both add up in fp32.

oneDNN compiles a kernel for each number of rows and each shape of weights, and keeps the 1,024 used last. Each takes
about 0.6 MiB, of which little is returned when it is dropped. So the rows of a product are padded to one of few
numbers, see `computed_rows`: products of 1 to 600 rows with four shapes of weights, each twice, then take 139 MiB
instead of 850 for the first time alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import Tensor, nn


class PackedLinears:
    """The packed weights of one model at a time. The model's own are not changed, and do not see later changes."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._forwards: dict[nn.Linear, Callable[[Tensor], Tensor]] = {}
        self._bytes = 0

    @contextmanager
    def used(self, model: nn.Module, *, pack: bool) -> Iterator[None]:
        """Compute the linear layers of `model` with packed weights, if they are packed, or if `pack` makes it so."""
        if self._model is not model:
            self.drop()
            if pack:
                self._pack(model)
        for module, forward in self._forwards.items():
            vars(module)["forward"] = forward
        try:
            yield
        finally:
            for module in self._forwards:
                del vars(module)["forward"]

    def drop(self) -> int:
        """Free the packed weights, because they are not needed or have changed; return their bytes."""
        freed, self._bytes = self._bytes, 0
        self._model, self._forwards = None, {}
        return freed

    @torch.no_grad()
    def _pack(self, model: nn.Module) -> None:
        self._model = model
        packed: dict[int, Tensor] = {}
        for module in model.modules():
            if not _packable(module):
                continue
            weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
            dtype = weight.dtype if _multiplies(weight.dtype) else torch.float32
            if weight.data_ptr() not in packed:
                self._bytes += weight.numel() * dtype.itemsize
                packed[weight.data_ptr()] = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), None)
            self._forwards[module] = _forward(packed[weight.data_ptr()], None if bias is None else bias.to(dtype))


@torch.no_grad()
def shows_columns(linear: Callable[[Tensor], Tensor], weight: Tensor, count: int = 8) -> bool:
    """Return whether `count` columns of the `weight [out, in]` with which `linear` computes are those given.

    Products with rows of the identity are exact, and each step of an optimizer changes all columns. `linear` may have
    more outputs. Not for GPUs, where products in TF32 are rounded.
    """
    outputs, inputs = weight.shape
    shown = torch.linspace(0, inputs - 1, min(count, inputs)).long()
    rows = torch.zeros(len(shown), inputs, dtype=weight.dtype).scatter_(1, shown[:, None], 1)
    return torch.equal(linear(rows)[:, :outputs], weight[:, shown].T)


def computed_rows(count: int) -> int:
    """Return the rows that are computed for `count` rows: up to 16 as many, then at most an eighth more.

    There are 8 numbers between two powers of two, so 80 up to 4,096.
    """
    step = 1 << max(0, (count - 1).bit_length() - 4)
    return -(-count // step) * step


def _forward(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1]).to(weight.dtype)
        more = computed_rows(len(rows)) - len(rows)
        padded = nn.functional.pad(rows, (0, 0, 0, more)) if more else rows
        product: Tensor = torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")[: len(rows)]
        return product.to(inputs.dtype).view(*inputs.shape[:-1], product.shape[-1])

    return forward


def _multiplies(dtype: torch.dtype) -> bool:
    """Return False for bfloat16 on an x86 processor without instructions for it."""
    found = torch.cpu.get_capabilities()
    if dtype != torch.bfloat16 or found.get("architecture") != "x86_64":
        return True
    return bool(found["avx512_bf16"] or found["amx_bf16"])


def _packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True for a plain linear layer, with its own forward and weights that oneDNN multiplies here."""
    if type(module) is not nn.Linear or "forward" in vars(module) or not torch.backends.mkldnn.is_available():
        return False
    weight = module.weight
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor or weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return not _multiplies(weight.dtype) or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and weight.numel() > 0
