"""Packed rows on a GPU: one kernel for all sequences of a row, `torch.nn.attention.varlen`, in half precision.

Where it cannot be used (a CPU, fp32, a torch without it) packed attention goes sequence by sequence (`attention`). Left
out: dropout, which the framework switches off.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


@cache
def kernel() -> Callable[..., Any] | None:
    """torch's `varlen_attn`; None where torch has none, or one that knows no windows, so no causal attention."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"window_size", "scale"} <= inspect.signature(varlen_attn).parameters.keys() else None


def usable(query: Tensor) -> bool:
    """Whether the kernel takes tensors such as `query`."""
    return query.is_cuda and query.dtype in HALF and kernel() is not None


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    *,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention within each sequence of a packed row: `[1, L, heads, D]`.

    `query [1, heads, L, D]`, `key` and `value [1, kv_heads, L, D]`; `bounds [n + 1]` int32 on their device, `longest`
    the most tokens of a sequence; with a `window` a token sees that many, itself among them.
    """
    attend = kernel()
    assert attend is not None
    q, k, v = (part.squeeze(0).transpose(0, 1).contiguous() for part in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    known = inspect.signature(attend).parameters
    shared: dict[str, Any] = {"enable_gqa": True} if groups > 1 and "enable_gqa" in known else {}
    if groups > 1 and not shared:
        k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
    left = -1 if window is None else window - 1
    output: Tensor = attend(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=(left, 0), **shared)
    return output[None]
