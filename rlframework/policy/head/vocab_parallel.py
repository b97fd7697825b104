"""Log-probabilities with a head sharded over the vocabulary: no rank ever holds all logits of a token.

All ranks have the same hidden states and targets, and get the same results. They exchange three numbers per token in
the forward, and the gradient of the hidden states in the backward. Rows that only pad the vocabulary are excluded from
the softmax.

Shapes: N requested tokens, H hidden size, R rows of the vocabulary on this rank, V all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.policy.head.logprobs import chunk_rows, entropy_of, scaled_logits


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows of the head in `group`: `rows` rows from id `start`. Further rows of its weight are padding.

    The ranks hold the vocabulary in rank order, without gaps.
    """

    group: dist.ProcessGroup
    start: int
    rows: int

    def local_rows(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local row of each target (0 if it is on another rank), and whether it is local, `[N]` each."""
        local = targets - self.start
        inside = (local >= 0) & (local < self.rows)
        return local.where(inside, 0), inside


class _SumOfGradients(torch.autograd.Function):
    """Identity; the backward sums the gradients of the group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _GatheredColumns(torch.autograd.Function):
    """`[N, R] -> [N, V]`; the backward takes this rank's columns of the gradient, which is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, shard: VocabularyShard) -> Tensor:
        ctx.columns = slice(shard.start, shard.start + shard.rows)
        sizes = _all_gather(torch.tensor([columns.shape[1]], device=columns.device), shard.group)[:, 0].tolist()
        parts = _all_gather(torch.nn.functional.pad(columns, (0, max(sizes) - columns.shape[1])), shard.group)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][:, ctx.columns].contiguous(), None


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[ranks, *shape]`: `tensor`, of the same shape on each rank of `group`, from all of them."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)


class _ParallelLogprobs(torch.autograd.Function):
    """`[N, H] -> [N]` log-probabilities and `[N]` entropies (no gradient through the entropies).

    The gradient of `hidden` is this rank's share; its sum over the group is the whole gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        shard: VocabularyShard,
        temperature: float,
        wants_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        rows = chunk_rows(weight.shape[0])
        local, inside = shard.local_rows(targets)
        # over this rank's rows only: logsumexp, the target's logit (0 if it is on another rank), mean logit
        local_stats = torch.zeros(3, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            logits = scaled_logits(hidden[chunk], weight, bias, temperature)
            local_stats[0, chunk] = logits.logsumexp(-1)
            local_stats[1, chunk] = logits.gather(-1, local[chunk, None]).squeeze(-1).where(inside[chunk], 0.0)
            if wants_entropy:
                local_stats[2, chunk] = local_stats[0, chunk] - entropy_of(logits, local_stats[0, chunk])
        normalizers_of_ranks, chosen, means = _all_gather(local_stats, shard.group).unbind(1)
        normalizers = normalizers_of_ranks.logsumexp(0)
        entropy = normalizers.new_empty(0)
        if wants_entropy:
            entropy = normalizers - ((normalizers_of_ranks - normalizers).exp() * means).sum(0)
        ctx.save_for_backward(hidden, weight, bias, local, inside, normalizers)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return chosen.sum(0) - normalizers, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, local, inside, normalizers = ctx.saved_tensors
        rows = chunk_rows(weight.shape[0])
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            scale = grads[0][chunk, None] / ctx.temperature
            logits = scaled_logits(hidden[chunk], weight, bias, ctx.temperature)
            # d logprob / d logits = onehot(target) - softmax over all ranks' rows
            slope = logits.sub_(normalizers[chunk, None]).exp_().mul_(-scale)
            slope.scatter_add_(1, local[chunk, None], scale * inside[chunk, None])
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            slope = slope.to(weight.dtype)
            grad_hidden[chunk] = slope @ weight
            grad_weight += slope.T @ hidden[chunk]
        whole_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), whole_bias, None, None, None, None


def parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    shard: VocabularyShard,
    *,
    temperature: float = 1.0,
    wants_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Like `chunked_logprobs`, for a head sharded over the ranks of `shard.group`. Collective.

    `hidden [N, H]` and `targets [N]` are the same on every rank; `weight [R or more, H]` and `bias` are this rank's
    rows. The gradient of `hidden` is whole on every rank, those of `weight` and `bias` are this rank's; padding rows
    get 0.
    """
    weight, bias = weight[: shard.rows], None if bias is None else bias[: shard.rows]
    logprobs, entropy = _ParallelLogprobs.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        _summed(hidden, shard), weight, bias, targets, shard, temperature, wants_entropy
    )
    return logprobs, entropy if wants_entropy else None


def parallel_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabularyShard, *, temperature: float = 1.0
) -> Tensor:
    """Return the whole logits `[N, V]` fp32 on every rank, for losses that need them. Collective.

    Arguments and gradients as for `parallel_logprobs`.
    """
    weight, bias = weight[: shard.rows], None if bias is None else bias[: shard.rows]
    columns = scaled_logits(_summed(hidden, shard), weight, bias, temperature)
    logits: Tensor = _GatheredColumns.apply(columns, shard)  # type: ignore[no-untyped-call]
    return logits


def _summed(hidden: Tensor, shard: VocabularyShard) -> Tensor:
    summed: Tensor = _SumOfGradients.apply(hidden, shard.group)  # type: ignore[no-untyped-call]
    return summed
