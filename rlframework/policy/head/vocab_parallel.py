"""Log-probabilities where each rank of a group holds some rows of the head: no rank ever holds all logits of a token.

Every rank has the same hidden states and targets, and gets the same results. What the ranks tell each other is three
numbers a token in the forward and the gradient of the hidden states in the backward. Rows that only pad the vocabulary
are left out of the softmax.

Shapes: N wanted tokens, H hidden size, R rows of the vocabulary here, V all of them.
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
    """Which rows this rank of `group` has: `rows` of them from the id `start`. More rows of its weight are padding.

    The ranks hold the vocabulary in their order, without gaps.
    """

    group: dist.ProcessGroup
    start: int
    rows: int

    def here(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """`[N]` each: the local row of each target (0 where it is another rank's), and whether it is here."""
        local = targets - self.start
        inside = (local >= 0) & (local < self.rows)
        return local.where(inside, 0), inside


class _SumOfGradients(torch.autograd.Function):
    """The identity; backward, the sum of the group's gradients."""

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
    """`[N, R] -> [N, V]`; backward, this rank's columns of the gradient, which is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, shard: VocabularyShard) -> Tensor:
        ctx.part = slice(shard.start, shard.start + shard.rows)
        sizes = _everyones(torch.tensor([columns.shape[1]], device=columns.device), shard.group)[:, 0].tolist()
        parts = _everyones(torch.nn.functional.pad(columns, (0, max(sizes) - columns.shape[1])), shard.group)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][:, ctx.part].contiguous(), None


def _everyones(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[ranks, *shape]`: `tensor`, of one shape everywhere, of each rank of `group`."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)


class _ParallelLogprobs(torch.autograd.Function):
    """`[N, H] -> [N]` log-probabilities and `[N]` entropies (no gradient through the entropies).

    The gradient of `hidden` that leaves it is this rank's share; the sum over the group is the whole.
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
        local, inside = shard.here(targets)
        # of this rank's rows alone: logsumexp, the target's logit (0 where it is not here), mean logit
        own = torch.zeros(3, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            logits = scaled_logits(hidden[part], weight, bias, temperature)
            own[0, part] = logits.logsumexp(-1)
            own[1, part] = logits.gather(-1, local[part, None]).squeeze(-1).where(inside[part], 0.0)
            if wants_entropy:
                own[2, part] = own[0, part] - entropy_of(logits, own[0, part])
        normalizers_of_ranks, chosen, means = _everyones(own, shard.group).unbind(1)
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
            part = slice(start, start + rows)
            scale = grads[0][part, None] / ctx.temperature
            logits = scaled_logits(hidden[part], weight, bias, ctx.temperature)
            # d logprob / d logits = onehot(target) - softmax over all ranks' rows
            slope = logits.sub_(normalizers[part, None]).exp_().mul_(-scale)
            slope.scatter_add_(1, local[part, None], scale * inside[part, None])
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            slope = slope.to(weight.dtype)
            grad_hidden[part] = slope @ weight
            grad_weight += slope.T @ hidden[part]
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
    """As `head.chunked_logprobs`, of a head that the ranks of `shard.group` hold together. Collective.

    `hidden [N, H]` and `targets [N]` are the same on every rank; `weight [R or more, H]` and `bias` are this rank's.
    Gradients reach `hidden` whole on every rank, `weight` and `bias` as this rank's; padding rows get 0.
    """
    weight, bias = weight[: shard.rows], None if bias is None else bias[: shard.rows]
    logprobs, entropy = _ParallelLogprobs.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        _summed(hidden, shard), weight, bias, targets, shard, temperature, wants_entropy
    )
    return logprobs, entropy if wants_entropy else None


def parallel_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabularyShard, *, temperature: float = 1.0
) -> Tensor:
    """Whole logits `[N, V]` fp32 on every rank, for what log-probabilities do not tell. Collective; as above."""
    weight, bias = weight[: shard.rows], None if bias is None else bias[: shard.rows]
    columns = scaled_logits(_summed(hidden, shard), weight, bias, temperature)
    logits: Tensor = _GatheredColumns.apply(columns, shard)  # type: ignore[no-untyped-call]
    return logits


def _summed(hidden: Tensor, shard: VocabularyShard) -> Tensor:
    summed: Tensor = _SumOfGradients.apply(hidden, shard.group)  # type: ignore[no-untyped-call]
    return summed
