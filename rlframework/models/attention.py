"""Attention for rows that `transformers` cannot describe: packed rows, and rows sharded along the sequence.

`row_attention` is registered in `transformers.AttentionInterface`; the layout of the rows is passed as `row_layout`, a
keyword of the model's forward. No mask function is registered under `ATTENTION`, so transformers creates no mask.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from rlframework.batch.batch_rows import copy_to

ATTENTION = "rlframework_rows"


class Scores(NamedTuple):
    """How scores are computed.

    `window`: the number of tokens that a token attends to, including itself. `chunk`: a token attends to those before
    it in its chunk of so many tokens, counted from the start of the sequence. `softcap`: scores are squashed to
    `softcap * tanh(score / softcap)`. `sinks [heads]`: the score of a further key without a value, in each row.
    """

    scaling: float | None = None
    dropout: float = 0.0
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def fused(self) -> bool:
        """Whether torch's kernels compute such scores."""
        return self.softcap is None and self.sinks is None


PLAIN = Scores()


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

    def causal(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Compute attention of the last `l` of `k` tokens, with `key` and `value [b, kv_heads, k, D]`; see `attend`."""
        queries, keys = query.shape[2], key.shape[2]
        window, chunk = (None if limit is None or keys <= limit else limit for limit in (scores.window, scores.chunk))
        plain = window is None and chunk is None and queries == keys and scores.fused
        mask = None if plain else self._visible_keys(queries, keys, window, chunk, query.device)
        if mask is not None and not scores.fused:
            return unfused(query, key, value, mask, scores).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=plain,
            dropout_p=scores.dropout,
            scale=scores.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)


def visible_keys(queries: int, keys: int, window: int | None, chunk: int | None, device: torch.device) -> Tensor:
    """Return `[queries, keys]` bool for the last `queries` of `keys` tokens.

    True for keys up to the query's own, at most the last `window` of them, in the query's `chunk`.
    """
    offset = keys - queries
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(offset)
    if window is not None:
        visible = visible.triu(offset + 1 - window)
    if chunk is not None:
        chunks = torch.arange(keys, device=device) // chunk
        visible = visible & (chunks[offset:, None] == chunks)
    return visible


def unfused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """Compute attention `[b, heads, l, D]` with soft caps or sinks, from all `heads * l * k` scores in fp32."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) if groups > 1 else tensor for tensor in (key, value))
    scaling = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    products = (query @ key.transpose(2, 3)).float() * scaling
    if scores.softcap is not None:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    products = products.masked_fill(~mask, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.float().view(1, -1, 1, 1).expand(*products.shape[:3], 1)
        products = torch.cat((products, sinks), -1)
    return products.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value


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
        if varlen_usable(query) and scores.fused:
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
        def split(chunk: int) -> Segments:
            sizes = [min(chunk, size - start) for size in self.sizes for start in range(0, size, chunk)]
            return Segments([0, *accumulate(sizes)])

        return cache(split)


class KernelCall:
    """One call of torch's kernel for sequences of different lengths, in rows of the same sequences.

    `queries`, `keys`: the lengths of each sequence of a row; its queries are the last of its tokens. Rows differ in
    these numbers, so the kernel gets few different ones: sequences without tokens are added up to a power of two, and
    the greatest lengths are rounded up to one.
    """

    def __init__(self, queries: Sequence[int], keys: Sequence[int]) -> None:
        self._longest = [power_of_two(max(sizes, default=0), 128) for sizes in (queries, keys)]

        def bounds_on(device: torch.device, rows: int) -> list[Tensor]:
            count = power_of_two(rows * len(queries), 16)
            made = []
            for sizes in (queries, keys):
                all_sizes = [0, *list(sizes) * rows, *[0] * (count - rows * len(sizes))]
                made.append(copy_to(torch.tensor(list(accumulate(all_sizes)), dtype=torch.int32), device))
            return made

        self._bounds_on = cache(bounds_on)  # the same in all layers

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Compute attention: `query [b, heads, l, D]`, `key` and `value [b, kv_heads, k, D]`; returns [b, l, heads, D].

        The causal mask of the kernel, which is that of FlashAttention 2.1 and later, lets the last query of a sequence
        see its last key (Dao-AILab/flash-attention#436). It has no dropout; the framework disables it.
        """
        kernel = varlen_kernel()
        assert kernel is not None
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (query, key, value))
        groups = query.shape[1] // key.shape[1]
        left = -1 if scores.window is None else scores.window - 1
        options: dict[str, Any] = {"scale": scores.scaling, "window_size": (left, 0)}
        if groups > 1 and "enable_gqa" in inspect.signature(kernel).parameters:
            options["enable_gqa"] = True
        elif groups > 1:
            k, v = (tensor.repeat_interleave(groups, 1) for tensor in (k, v))
        output: Tensor = kernel(q, k, v, *self._bounds_on(query.device, len(query)), *self._longest, **options)
        by_row: Tensor = output.unflatten(0, (len(query), -1))
        return by_row


def power_of_two(value: int, least: int) -> int:
    """Round `value` up to a power of two, at least `least`."""
    return max(least, 1 << max(value - 1, 0).bit_length())


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """Return torch's `varlen_attn`; None if torch lacks it, or its `window_size` (for causal attention) or `scale`."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"window_size", "scale"} <= inspect.signature(varlen_attn).parameters.keys() else None


def kernel_for_packed_rows(device: torch.device, *, half_precision: bool) -> bool:
    """Whether one kernel, FlashAttention, computes packed rows on `device`: in half precision from Ampere on."""
    if device.type != "cuda" or not half_precision or varlen_kernel() is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def varlen_usable(query: Tensor) -> bool:
    """Return True if the kernel supports the device, dtype and head size of `query [..., D]`."""
    half, size = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    return size % 8 == 0 and size <= 256 and kernel_for_packed_rows(query.device, half_precision=half)


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
