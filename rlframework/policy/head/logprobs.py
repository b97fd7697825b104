"""Log-probabilities, top-k tokens and logits from hidden states, with a whole head or one sharded over the vocabulary.

Log-probabilities and top-k tokens are computed in chunks, without ever materializing all fp32 logits
`[tokens, vocabulary]`; a hand-written backward recomputes the logits of each chunk.

Shapes: N requested tokens, H hidden size, V vocabulary. With a `shard`, `weight` and `bias` are this rank's rows, all
ranks pass the same `hidden` and `targets`, and the calls are collective; for gradients see `VocabularyShard.inputs`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlframework.errors import BatchError
from rlframework.policy.head.vocab_parallel import VocabularyShard

CHUNK_ELEMENTS = 1 << 23
"""Maximum number of fp32 logits in memory at once: 32 MiB."""


def chunk_rows(vocabulary: int) -> int:
    """Return the number of tokens per chunk."""
    return max(1, CHUNK_ELEMENTS // vocabulary)


def scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return the fp32 logits `[N, V]` of `hidden [N, H]`, divided by `temperature`."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def whole_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabularyShard | None, *, temperature: float = 1.0
) -> Tensor:
    """Return the whole logits `[N, V]` fp32 on every rank, for losses that need them."""
    if shard is None:
        return scaled_logits(hidden, weight, bias, temperature)
    return shard.gather_columns(scaled_logits(*shard.inputs(hidden, weight, bias), temperature))


@torch.no_grad()
def top_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabularyShard | None, k: int, temperature: float
) -> Tensor:
    """Return `[N, 2 k]` fp32: the k largest logits of `hidden [N, H]` at `temperature`, then their token ids.

    fp32 represents every id below 2**24 exactly. Raises a `BatchError` if k exceeds the vocabulary.
    """
    chunks = []
    for rows in hidden.split(chunk_rows(weight.shape[0])):
        logits = whole_logits(rows, weight, bias, shard, temperature=temperature)
        if k > logits.shape[1]:
            raise BatchError(f"k is {k}, but the model has {logits.shape[1]} tokens")
        values, tokens = logits.topk(k, -1)
        chunks.append(torch.cat((values, tokens.to(values.dtype)), 1))
    return torch.cat(chunks)


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    shard: VocabularyShard | None = None,
    *,
    temperature: float = 1.0,
    wants_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log p(target) of each row and, on request, the entropy of its distribution.

    `hidden [N, H]`, `weight [V, H]`, `bias [V]`, `targets [N]` int64; returns `[N]` fp32 each. Gradients flow through
    the log-probabilities to `hidden`, `weight` and `bias`; the entropy has none.
    """
    if shard is not None:
        hidden, weight, bias = shard.inputs(hidden, weight, bias)
    elif hidden.shape[0] <= chunk_rows(weight.shape[0]):  # one chunk: the fused kernel, without recomputation
        logits = scaled_logits(hidden, weight, bias, temperature)
        logprobs = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        entropy = None
        if wants_entropy:
            with torch.no_grad():
                entropy = _entropy_of(logits, logits.logsumexp(-1))
        return logprobs, entropy
    logprobs, entropies = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        hidden, weight, bias, targets, shard, temperature, wants_entropy
    )
    return logprobs, entropies if wants_entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    """`[N, H] -> [N]` log-probabilities and `[N]` entropies (no gradient through the entropies).

    With a shard, the gradient of `hidden` is this rank's term of the whole gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        shard: VocabularyShard | None,
        temperature: float,
        wants_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        count, rows = hidden.shape[0], chunk_rows(weight.shape[0])
        inside = None
        if shard is not None:
            targets, inside = shard.local_rows(targets)
        normalizers = torch.empty(count, dtype=torch.float32, device=hidden.device)
        chosen, entropies = torch.empty_like(normalizers), torch.zeros_like(normalizers)
        for start in range(0, count, rows):
            chunk = slice(start, start + rows)
            logits = scaled_logits(hidden[chunk], weight, bias, temperature)
            normalizers[chunk] = logits.logsumexp(-1)
            chosen[chunk] = logits.gather(-1, targets[chunk, None]).squeeze(-1)
            if wants_entropy:
                entropies[chunk] = _entropy_of(logits, normalizers[chunk])
        if shard is not None and inside is not None:
            normalizers, chosen, entropies = shard.combine(normalizers, chosen.where(inside, 0.0), entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, inside, normalizers)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return chosen - normalizers, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, inside, normalizers = ctx.saved_tensors
        rows = chunk_rows(weight.shape[0])
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            scale = grads[0][chunk, None] / ctx.temperature
            logits = scaled_logits(hidden[chunk], weight, bias, ctx.temperature)
            # d logprob / d logits = onehot(target) - softmax: -softmax * scale, and + scale at the target
            slope = logits.sub_(normalizers[chunk, None]).exp_().mul_(-scale)
            slope.scatter_add_(1, targets[chunk, None], scale if inside is None else scale * inside[chunk, None])
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            slope = slope.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = slope @ weight
            if grad_weight is not None:
                grad_weight += slope.T @ hidden[chunk]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 4,
        )


def _entropy_of(logits: Tensor, normalizer: Tensor) -> Tensor:
    """Return the entropy `[N]` in nats of the softmax of `logits [N, V]`, whose logsumexp is `normalizer [N]`."""
    probabilities = (logits - normalizer[:, None]).exp_()
    mean_logit: Tensor = torch.linalg.vecdot(probabilities, logits)
    return normalizer - mean_logit
