"""Attention for packed rows: causal within each sequence, without an L x L mask.

On a GPU in half precision, one `torch.nn.attention.varlen` kernel computes the whole row; elsewhere there is one call
per run of sequences of equal length.

Registered in `transformers.AttentionInterface` under `SEGMENTS`; the sequences are passed as `segments`, a keyword of
the model's forward. No mask function is registered under that name, so transformers creates no mask. Runs on any
device. Not supported: soft-capped scores and attention sinks, which are rejected.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.errors import NotSupported

SEGMENTS = "rlframework_segments"


class Segments:
    """The sequences of a packed row.

    `bounds`: the start of each sequence and the end of the last; `longest`: the length of the longest; `runs`: (length,
    count) of each run of sequences of equal length, computed in one call. It is an object rather than numbers so that
    `torch.compile` does not recompile the forward for every row.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = tuple(bounds)
        sizes = [end - start for start, end in pairwise(bounds)]
        self.longest = max(sizes, default=0)
        self.runs = [(length, len(list(run))) for length, run in groupby(sizes)]
        self._on_device: Tensor | None = None

    def bounds_on(self, device: torch.device) -> Tensor:
        """Return `bounds` as int32 on `device`, created once for all layers."""
        if self._on_device is None:
            self._on_device = torch.tensor(self.bounds, dtype=torch.int32, device=device)
        return self._on_device


def require_plain_scores(softcap: float | None, s_aux: Tensor | None, cannot: str, remedy: str) -> None:
    """Raise `NotSupported` for soft-capped scores and attention sinks."""
    if softcap is not None or s_aux is not None:
        raise NotSupported(f"{cannot} soft-capped scores or attention sinks; {remedy}")


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sequence of a packed row.

    `query [1, heads, L, D]`, `key` and `value [1, kv_heads, L, D]`; returns `[1, L, heads, D]`.
    """
    require_plain_scores(softcap, s_aux, "packed attention does not support", "set policy.batching.mode=dynamic")
    if varlen_usable(query):
        return varlen_attention(query, key, value, segments, scaling=scaling, window=sliding_window), None
    runs = segments.runs
    sizes = [length * count for length, count in runs]
    outputs = []
    for (length, count), *split in zip(
        runs, query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True
    ):
        # [count, heads, length, D]; squeeze, because the backward of indexing first fills a tensor with zeros
        q, k, v = (tensor.squeeze(0).unflatten(1, (count, length)).transpose(0, 1) for tensor in split)
        window = None if sliding_window is None or length <= sliding_window else sliding_window
        mask = None if window is None else visible_keys(length, length, window, query.device)
        outputs.append(causal_attention(q, k, v, mask, scaling, dropout).flatten(0, 1))  # [count * length, heads, D]
    return torch.cat(outputs)[None], None


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, dropout: float
) -> Tensor:
    """Compute attention from `[b, heads, l, D]` to `[b, l, heads, D]`: causal, or to the keys in `mask`."""
    output = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2)


def visible_keys(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return `[queries, keys]` bool for the last `queries` of `keys` tokens.

    True for keys up to the query's own, at most the last `window` of them.
    """
    offset = keys - queries
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(offset)
    return visible if window is None else visible.triu(offset + 1 - window)


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """Return torch's `varlen_attn`; None if torch lacks it, or its `window_size` (for causal attention) or `scale`."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"window_size", "scale"} <= inspect.signature(varlen_attn).parameters.keys() else None


def varlen_usable(query: Tensor) -> bool:
    """Return True if the kernel supports the device and dtype of `query`."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and varlen_kernel() is not None


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scaling: float | None, window: int | None
) -> Tensor:
    """Compute `segment_attention` with the kernel, which has no dropout; the framework disables it.

    `window`: the number of tokens that a token attends to, including itself.
    """
    attend = varlen_kernel()
    assert attend is not None
    q, k, v = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    supported = inspect.signature(attend).parameters
    shared: dict[str, Any] = {"enable_gqa": True} if groups > 1 and "enable_gqa" in supported else {}
    if groups > 1 and not shared:
        k, v = (tensor.repeat_interleave(groups, 1) for tensor in (k, v))
    bounds, longest = segments.bounds_on(query.device), segments.longest
    left = -1 if window is None else window - 1
    output: Tensor = attend(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=(left, 0), **shared)
    return output[None]


def register() -> None:
    """Register the attention with transformers; repeated calls are harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(SEGMENTS, segment_attention)


@contextmanager
def attention(config: Any, name: str) -> Iterator[None]:
    """Switch models of `config` to the attention `name`, which each layer looks up in their shared configuration.

    Only the text model is switched: the vision modules of a multimodal model keep their own attention.
    """
    text = config.get_text_config()
    previous = text._attn_implementation
    text._attn_implementation = name
    try:
        yield
    finally:
        text._attn_implementation = previous
