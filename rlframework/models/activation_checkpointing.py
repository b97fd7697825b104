"""Activation checkpointing of transformers models: each block recomputes in the backward what it did not keep.

`full` keeps only a block's inputs, and runs its forward a second time. `selective` also keeps the results of matrix
products and attention kernels, so that only norms, rotary embeddings and activation functions run again.

Collectives inside a block, such as the gathering of keys and values in context parallelism, are repeated by both: their
results are as large as the whole sequence's keys and values, and one gather per block is cheap beside the attention.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rlframework.base.errors import NotSupported

Mode = Literal["selective", "full"]

KEPT = frozenset(
    (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::linear",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    )
)
"""The operators whose results `selective` keeps."""


def checkpoint_activations(model: Any, mode: Mode) -> None:
    """Enable activation checkpointing in the blocks of `model`; call this before the model is sharded."""
    keys: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        keys["context_fn"] = selective_contexts
    # newer versions of transformers use the first name, older ones the second
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(keys)


def selective_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a block's forward and of its recomputation: the `context_fn` of torch's `checkpoint`.

    torch's own (`create_selective_checkpoint_contexts`) fail if the recomputation runs an operator that the forward did
    not. Engines do so: ZeRO-3 gathers weights in hooks inside a block, from where they then are.
    """
    kept: deque[_Kept] = deque()
    return _Keep(kept), _Reuse(kept)


class _Kept(NamedTuple):
    """The result of a call; None if a collective changed it."""

    operator: Any
    result: Any
    versions: list[int]


class _Keep(TorchDispatchMode):
    """Keeps the results of `KEPT` in the order of their calls."""

    def __init__(self, kept: deque[_Kept]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_kept(func):
            alias = tree_map_only(Tensor, _alias, result)
            self._kept.append(_Kept(func, alias, _versions(alias)))
        elif func.namespace == "c10d":
            self._forget(args)
        return result

    def _forget(self, args: Any) -> None:
        """Drop results in the memory of `args`, which a collective may have changed without raising their version."""
        changed = _memory(args)
        for index, kept in enumerate(self._kept):
            if kept.result is not None and not changed.isdisjoint(_memory(kept.result)):
                self._kept[index] = kept._replace(result=None)


class _Reuse(TorchDispatchMode):
    """Returns what was kept instead of computing it again, unless the block changed it."""

    def __init__(self, kept: deque[_Kept]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_kept(func):
            return func(*args, **(kwargs or {}))
        kept = self._kept.popleft() if self._kept else None
        if kept is None or kept.operator is not func:
            raise NotSupported(
                f"the backward pass calls {func} where the forward pass of a block did not, so what it kept cannot be "
                "used; set policy.activation_checkpointing to full"
            )
        changed = kept.result is None or _versions(kept.result) != kept.versions
        return func(*args, **(kwargs or {})) if changed else kept.result


@cache
def _is_kept(operator: Any) -> bool:
    return operator.name().partition(".")[0] in KEPT


def _alias(tensor: Tensor) -> Tensor:
    """The same memory without the graph that `tensor` becomes part of, which would keep itself alive."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()  # a change in place is then seen in its version


def _memory(values: Any) -> set[int]:
    """The addresses of plain tensors; those of others, such as DTensors, are not in-place arguments of collectives."""
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if type(leaf) is Tensor}


def _versions(result: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
