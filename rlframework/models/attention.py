"""Attention for packed rows: causal within each sequence, without an L x L mask.

On a GPU in half precision, one kernel computes the whole row (`varlen`); elsewhere there is one call per run of
sequences of equal length.

Registered in `transformers.AttentionInterface` under `SEGMENTS`; the sequences are passed as `segments`, a keyword of
the model's forward. No mask function is registered under that name, so transformers creates no mask. Runs on any
device. Not supported: soft-capped scores and attention sinks, which are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.errors import NotSupported
from rlframework.models import varlen

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
    if varlen.usable(query):
        bounds = segments.bounds_on(query.device)
        return varlen.varlen_attention(
            query, key, value, bounds, segments.longest, scaling=scaling, window=sliding_window
        ), None
    runs = segments.runs
    sizes = [length * count for length, count in runs]
    outputs = []
    for (length, count), *split in zip(
        runs, query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True
    ):
        # [count, heads, length, D]; squeeze, because the backward of indexing first fills a tensor with zeros
        q, k, v = (tensor.squeeze(0).unflatten(1, (count, length)).transpose(0, 1) for tensor in split)
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


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return the `[length, length]` bool mask of a causal sliding window."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - window)


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
