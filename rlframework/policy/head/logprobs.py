"""Log-probabilities from hidden states in chunks, without ever materializing all fp32 logits `[tokens, vocabulary]`.

`chunked_logprobs` has a hand-written backward that recomputes the logits of each chunk. Shapes: N requested tokens, H
hidden size, V vocabulary. For a head sharded over the vocabulary see `vocab_parallel`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 23
"""Maximum number of fp32 logits in memory at once: 32 MiB."""


def chunk_rows(vocabulary: int) -> int:
    """Return the number of tokens per chunk."""
    return max(1, CHUNK_ELEMENTS // vocabulary)


def scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return the fp32 logits `[N, V]` of `hidden [N, H]`, divided by `temperature`."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


class _ChunkedLogprobs(torch.autograd.Function):
    """`[N, H] -> [N]` log-probabilities and `[N]` entropies (no gradient through the entropies)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        wants_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        count, rows = hidden.shape[0], chunk_rows(weight.shape[0])
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if wants_entropy else logprobs.new_empty(0)
        for start in range(0, count, rows):
            chunk = slice(start, start + rows)
            logits = scaled_logits(hidden[chunk], weight, bias, temperature)
            normalizer = logits.logsumexp(-1)
            normalizers[chunk] = normalizer
            logprobs[chunk] = logits.gather(-1, targets[chunk, None]).squeeze(-1) - normalizer
            if wants_entropy:
                entropy[chunk] = entropy_of(logits, normalizer)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers = ctx.saved_tensors
        grad = grads[0]
        rows = chunk_rows(weight.shape[0])
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            scale = grad[chunk, None] / ctx.temperature
            logits = scaled_logits(hidden[chunk], weight, bias, ctx.temperature)
            # d logprob / d logits = onehot(target) - softmax: -softmax * scale, and + scale at the target
            slope = logits.sub_(normalizers[chunk, None]).exp_().mul_(-scale)
            slope.scatter_add_(1, targets[chunk, None], scale)
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
            None,
            None,
            None,
        )


def entropy_of(logits: Tensor, normalizer: Tensor) -> Tensor:
    """Return the entropy `[N]` in nats of the softmax of `logits [N, V]`, whose logsumexp is `normalizer [N]`."""
    probabilities = (logits - normalizer[:, None]).exp_()
    mean_logit: Tensor = torch.linalg.vecdot(probabilities, logits)
    return normalizer - mean_logit


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    wants_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log p(target) of each row and, on request, the entropy of its distribution.

    `hidden [N, H]`, `weight [V, H]`, `bias [V]`, `targets [N]` int64; returns `[N]` fp32 each. Gradients flow through
    the log-probabilities to `hidden`, `weight` and `bias`; the entropy has none.
    """
    if hidden.shape[0] <= chunk_rows(weight.shape[0]):  # one chunk: the fused kernel, without recomputation
        logits = scaled_logits(hidden, weight, bias, temperature)
        logprobs = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        entropy = None
        if wants_entropy:
            with torch.no_grad():
                entropy = entropy_of(logits, logits.logsumexp(-1))
        return logprobs, entropy
    logprobs, entropies = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        hidden, weight, bias, targets, temperature, wants_entropy
    )
    return logprobs, entropies if wants_entropy else None
