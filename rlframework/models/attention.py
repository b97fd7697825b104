"""Attention for rows that `transformers` cannot describe: packed rows, and rows sharded along the sequence.

`row_attention` is registered in `transformers.AttentionInterface`; the layout of the rows is passed as `row_layout`, a
keyword of the model's forward. No mask function is registered under `ATTENTION`, so transformers creates no mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from rlframework.models.varlen import PLAIN, KernelCall, Scores, unfused, varlen_usable, visible_keys

ATTENTION = "rlframework_rows"
"""Name under which the attention of row layouts is registered with transformers."""


class RowLayout(ABC):
    """How sequences lie in the rows of a forward, and the attention among them.

    It is an object rather than numbers so that `torch.compile` does not recompile the forward for every row.
    """

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        """Compute causal attention within each sequence.

        `query [b, heads, l, D]`, `key` and `value [b, kv_heads, l, D]`; returns `[b, l, heads, D]`.
        """

    @cached_property
    def _visible_keys(self) -> Callable[[int, int, int | None, int | None, torch.device], Tensor]:
        return cache(visible_keys)  # the masks are the same in all layers

    @cached_property
    def _kernel_call(self) -> Callable[[int, int], KernelCall]:
        return cache(lambda queries, keys: KernelCall([queries], [keys]))

    def causal(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Compute attention of the last `l` of `k` tokens, with `key` and `value [b, kv_heads, k, D]`; see `attend`."""
        queries, keys = query.shape[2], key.shape[2]
        window, chunk = (None if limit is None or keys <= limit else limit for limit in (scores.window, scores.chunk))
        scores = scores._replace(window=window, chunk=chunk)
        plain = window is None and chunk is None and queries == keys and scores.fused
        if not plain and varlen_usable(query, scores):
            return self._kernel_call(queries, keys).attend(query, key, value, scores)
        if not scores.fused:
            return unfused(query, key, value, scores).transpose(1, 2)
        mask = None if plain else self._visible_keys(queries, keys, window, chunk, query.device)
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and not takes_groups(query, mask):
            key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
        return nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=plain,
            dropout_p=scores.dropout,
            scale=scores.scaling,
            enable_gqa=groups > 1,
        ).transpose(1, 2)


def takes_groups(query: Tensor, mask: Tensor | None) -> bool:
    """Return False if torch would compute all scores only because several heads share keys: on a GPU, with a mask or
    in fp32, its memory-efficient kernel needs as many key-value heads as heads.
    """
    return query.device.type != "cuda" or (mask is None and query.dtype != torch.float32 and query.shape[-1] <= 256)


class PaddedRows(RowLayout):
    """A sequence in each row, padded on the right.

    transformers has an attention for them, but looks into the positions for packed rows, and so waits for the device.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        """See `RowLayout.attend`."""
        return self.causal(query, key, value, scores)


class Segments(RowLayout):
    """A packed row. On a GPU in half precision, one kernel computes the whole row.

    `bounds`: the start of each sequence and the end of the last. Elsewhere there is one call for each of `runs`, the
    (length, count) of adjacent sequences of equal length.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self.sizes = sizes = [end - start for start, end in pairwise(bounds)]
        self.runs = [(length, len(list(run))) for length, run in groupby(sizes)]
        self._kernel = KernelCall(sizes, sizes)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        """See `RowLayout.attend`; `b` is 1."""
        if scores.chunk is not None and max(self.sizes) > scores.chunk:  # chunks are sequences
            return self._of_chunks(scores.chunk).attend(query, key, value, scores._replace(chunk=None))
        if varlen_usable(query, scores):
            return self._kernel.attend(query, key, value, scores)
        sizes = [length * count for length, count in self.runs]
        outputs = []
        parts = zip(*(tensor.split(sizes, 2) for tensor in (query, key, value)), strict=True)
        for (length, count), split in zip(self.runs, parts, strict=True):
            # [count, heads, length, D]; squeeze, because the backward of indexing first fills a tensor with zeros
            q, k, v = (tensor.squeeze(0).unflatten(1, (count, length)).transpose(0, 1) for tensor in split)
            outputs.append(self.causal(q, k, v, scores).flatten(0, 1))  # [count * length, heads, D]
        return torch.cat(outputs)[None]

    @cached_property
    def _of_chunks(self) -> Callable[[int], Segments]:
        return cache(lambda chunk: Segments([0, *accumulate(chunk_sizes(self.sizes, chunk))]))


def chunk_sizes(sizes: Sequence[int], chunk: int) -> list[int]:
    """Return the lengths of the chunks of sequences of `sizes` tokens."""
    return [min(chunk, size - start) for size in sizes for start in range(0, size, chunk)]


def row_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_layout: RowLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **limits: Any,
) -> tuple[Tensor, None]:
    """Compute `RowLayout.attend`, called by a transformers model.

    A model that leaves its window or chunks to the mask, which is not made here, gets them from its configuration.
    """
    config = module.config
    kinds = getattr(config, "layer_types", None)
    kind = kinds[module.layer_idx] if kinds else None
    window = limits.get("sliding_window")
    if "sliding_window" not in limits and kind in (None, "sliding_attention"):
        window = getattr(config, "sliding_window", None) or None
    chunk = config.attention_chunk_size if kind == "chunked_attention" else None
    return row_layout.attend(query, key, value, Scores(scaling, dropout, window, chunk, softcap, s_aux)), None


def register() -> None:
    """Register the attention with transformers; repeated calls are harmless."""
    AttentionInterface.register(ATTENTION, row_attention)


@contextmanager
def attention(config: Any) -> Iterator[None]:
    """Switch models of `config` to `ATTENTION`, which each layer looks up in their shared configuration.

    Only the text model is switched: the vision modules of a multimodal model keep their own attention.
    """
    text = config.get_text_config()
    previous = text._attn_implementation
    text._attn_implementation = ATTENTION
    try:
        yield
    finally:
        text._attn_implementation = previous
