"""Attention by segments: a packed row whose sequences do not see each other, without a mask of L x L.

Registered in `transformers.AttentionInterface` under `SEGMENTS`; the bounds of the sequences come as `cu_seqlens`, a
keyword of the model's forward. No mask function is registered under that name, so transformers makes no mask. Runs on
any device. Left out: soft-capped scores and attention sinks, which are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.errors import NotSupported

SEGMENTS = "rlframework_segments"


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seqlens: list[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each segment of a packed row.

    `query [1, heads, L, D]`, `key` and `value [1, kv_heads, L, D]`; `cu_seqlens`: the bounds, a list so that nothing
    waits for the device. Returns `[1, L, heads, D]`.
    """
    if softcap is not None or s_aux is not None:
        raise NotSupported(
            "packed attention does not do soft-capped scores or attention sinks; set policy.batching.mode=dynamic"
        )
    runs = segment_runs(cu_seqlens)
    sizes = [length * count for length, count in runs]
    outputs = []
    for (length, count), *parts in zip(
        runs, query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True
    ):
        q, k, v = (part[0].unflatten(1, (count, length)).transpose(0, 1) for part in parts)  # [count, heads, length, D]
        window = None if sliding_window is None or length <= sliding_window else sliding_window
        output = nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if window is None else _window_mask(length, window, query.device),
            is_causal=window is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))  # [count * length, heads, D]
    return torch.cat(outputs)[None], None


def segment_runs(cu_seqlens: list[int]) -> list[tuple[int, int]]:
    """(length, count) of each run of segments of one length: these are attended to in one call."""
    sizes = (end - start for start, end in pairwise(cu_seqlens))
    return [(length, len(list(run))) for length, run in groupby(sizes)]


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """`[length, length]` bool of a causal sliding window."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - window)


def register() -> None:
    """Make the attention known to transformers; again is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(SEGMENTS, segment_attention)


@contextmanager
def attention(config: Any, name: str) -> Iterator[None]:
    """Within it, models of `config` use the attention `name`: each layer looks it up in their shared configuration.

    Only text is packed: the parts of a multimodal model that look at images keep their own.
    """
    text = config.get_text_config()
    previous = text._attn_implementation
    text._attn_implementation = name
    try:
        yield
    finally:
        text._attn_implementation = previous
