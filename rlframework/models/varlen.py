"""Packed attention on a GPU in half precision: one `torch.nn.attention.varlen` kernel for all sequences of a row.

If it is unavailable (on a CPU, in fp32, in a torch without it), `attention` computes packed attention by sequence. Not
supported: dropout, which the framework disables.
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
    """Return torch's `varlen_attn`; None if torch lacks it, or its `window_size` (for causal attention) or `scale`."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"window_size", "scale"} <= inspect.signature(varlen_attn).parameters.keys() else None


def usable(query: Tensor) -> bool:
    """Return True if the kernel supports the device and dtype of `query`."""
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
    """Compute causal attention within each sequence of a packed row: `[1, L, heads, D]`.

    `query [1, heads, L, D]`, `key` and `value [1, kv_heads, L, D]`; `bounds [n + 1]` int32 on their device; `longest`:
    the length of the longest sequence; `window`: the number of tokens that a token attends to, including itself.
    """
    attend = kernel()
    assert attend is not None
    q, k, v = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    supported = inspect.signature(attend).parameters
    shared: dict[str, Any] = {"enable_gqa": True} if groups > 1 and "enable_gqa" in supported else {}
    if groups > 1 and not shared:
        k, v = (tensor.repeat_interleave(groups, 1) for tensor in (k, v))
    left = -1 if window is None else window - 1
    output: Tensor = attend(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=(left, 0), **shared)
    return output[None]
