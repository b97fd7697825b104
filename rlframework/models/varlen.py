"""How attention scores are computed, and attention of several sequences in one call of torch's variable-length kernel.

`unfused` computes scores that no kernel of torch computes. The kernel, FlashAttention, knows no sinks, but returns the
logsumexp of each query's scores. With it, attention with the sink s of a head is `output * sigmoid(logsumexp - s)`. See
`_WithSinks` for the gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlframework.batch.batch_rows import copy_to

BLOCK_SCORES = 1 << 26
"""Maximum number of scores in memory at once in `unfused`. Each takes about 20 bytes in the backward: 1.3 GB."""


class Scores(NamedTuple):
    """How scores are computed.

    `window`: the number of tokens that a token attends to, including itself. `chunk`: a token attends to those before
    it in its chunk of `chunk` tokens, counted from the start of the sequence. `softcap`: scores are squashed to
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
        """Whether torch's `scaled_dot_product_attention` computes such scores."""
        return self.softcap is None and self.sinks is None


PLAIN = Scores()
"""Scores with nothing special: the softmax of the scaled products of queries and keys."""


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


def unfused(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Compute attention `[b, heads, l, D]` of the last `l` of `k` tokens with soft caps or sinks, from scores in fp32.

    If there are more than `BLOCK_SCORES`, they are computed by blocks of queries, and again in the backward.
    """
    queries, keys = query.shape[2], key.shape[2]
    rows = max(1, BLOCK_SCORES // (query.shape[0] * query.shape[1] * keys))
    if rows >= queries:
        return _unfused_block(query, key, value, scores)
    outputs = []
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        last = keys - queries + stop
        # the first key that the block's first query sees; chunks are counted from the first of all keys
        seen = keys if scores.window is None or scores.chunk is not None else scores.window
        first = max(0, last - (stop - start) + 1 - seen)
        parts = query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last]
        outputs.append(checkpoint(_unfused_block, *parts, scores, use_reentrant=False))
    return torch.cat(outputs, 2)


def _unfused_block(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    mask = visible_keys(query.shape[2], key.shape[2], scores.window, scores.chunk, query.device)
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


HALF = (torch.bfloat16, torch.float16)


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
        see its last key (Dao-AILab/flash-attention#436). It has no dropout; the framework disables it. The heads of
        `value` may be smaller than those of `key`, as in DeepSeek's latent attention.
        """
        width = value.shape[-1]
        if width < key.shape[-1]:
            value = torch.nn.functional.pad(value, (0, key.shape[-1] - width))
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (query, key, value))
        groups = query.shape[1] // key.shape[1]
        left = -1 if scores.window is None else scores.window - 1
        options: dict[str, Any] = {"scale": scores.scaling, "window_size": (left, 0)}
        if groups > 1 and "enable_gqa" in inspect.signature(_kernel()).parameters:
            options["enable_gqa"] = True
        elif groups > 1:
            k, v = (tensor.repeat_interleave(groups, 1) for tensor in (k, v))
        lengths = (*self._bounds_on(query.device, len(query)), *self._longest)
        if scores.sinks is None:
            output: Tensor = _kernel()(q, k, v, *lengths, **options)
        else:
            output = _WithSinks.apply(q, k, v, scores.sinks, lengths, options)  # type: ignore[no-untyped-call]
        by_row: Tensor = output[..., :width].unflatten(0, (len(query), -1))
        return by_row


class _WithSinks(torch.autograd.Function):
    """Attention `[T, heads, D]` with `sinks [heads]`, by the kernel; `lengths` and `options` are its other arguments.

    Let p be the probabilities of a query's keys beside the sink, o its output and g the output's gradient. The gradient
    of a score is `p * (g @ value - g @ o)`, and that of the sink `-(1 - sum(p)) * (g @ o)`. The kernel's backward
    computes p from a given logsumexp, and `g @ o` from a given output, so it gets those with the sink. (The gradient
    of the logsumexp, which automatic differentiation would need, torch's kernel ignores.)
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, lengths: Any, options: dict[str, Any]
    ) -> Tensor:
        from torch.nn.attention.varlen import AuxRequest

        plain, logsumexp = _kernel()(query, key, value, *lengths, **options, return_aux=AuxRequest(lse=True))
        if logsumexp.shape != (query.shape[1], query.shape[0]):
            raise RuntimeError(
                f"torch's variable-length attention returned the logsumexp with shape {list(logsumexp.shape)}, not "
                "[heads, tokens]: with this version of torch attention sinks need policy.precision=float32"
            )
        of_sinks = sinks.float()[:, None]
        share = torch.sigmoid(logsumexp - of_sinks)  # of the keys beside the sink, [heads, T]
        output: Tensor = (plain * share.T[..., None]).to(plain.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, torch.logaddexp(logsumexp, of_sinks), share)
        ctx.lengths, ctx.options = lengths, options
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, logsumexp, share = ctx.saved_tensors
        grad, (scale, window) = grads[0].contiguous(), (ctx.options["scale"], ctx.options["window_size"])
        gradients = kernel_backward(grad, query, key, value, output, logsumexp, ctx.lengths, scale, window)
        weighted = torch.linalg.vecdot(grad.float(), output.float()).T  # [heads, T]
        return (*gradients, -((1.0 - share) * weighted).sum(1).to(sinks.dtype), None, None)


def kernel_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    lengths: tuple[Tensor, Tensor, int, int],
    scale: float | None,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value for the gradient `grad [T, heads, D]` of the kernel's output.

    `logsumexp [heads, T]` fp32; `lengths`: the bounds of queries and of keys, and the longest of each. torch has no
    public function for it; this is what its `varlen_attn` calls.
    """
    nothing, state = query.new_empty(0), torch.zeros(2, dtype=torch.uint64, device=query.device)  # of the dropout
    limits = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, query, key, value, output, logsumexp, *lengths, 0.0, window == (-1, 0), state, nothing, **limits
    )
    return gradients


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


def _kernel() -> Callable[..., Any]:
    kernel = varlen_kernel()
    assert kernel is not None
    return kernel


def kernel_for_packed_rows(device: torch.device, *, half_precision: bool) -> bool:
    """Whether one kernel, FlashAttention, computes packed rows on `device`: in half precision from Ampere on."""
    if device.type != "cuda" or not half_precision or varlen_kernel() is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def varlen_usable(query: Tensor, scores: Scores) -> bool:
    """Return True if the kernel supports the device, dtype and head size of `query [..., D]`, and `scores`."""
    size = query.shape[-1]
    known = size % 8 == 0 and size <= 256 and scores.chunk is None and scores.softcap is None
    return known and kernel_for_packed_rows(query.device, half_precision=query.dtype in HALF)
