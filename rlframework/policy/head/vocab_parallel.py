"""A head sharded over the vocabulary: no rank ever holds all logits of a token.

All ranks have the same hidden states and targets, and get the same results. They exchange three numbers per token in
the forward, and the gradient of the hidden states in the backward. Rows that only pad the vocabulary are excluded from
the softmax.

Shapes: N requested tokens, H hidden size, R rows of the vocabulary on this rank, V all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows of the head in `group`: `rows` rows from id `start`. Further rows of its weight are padding.

    The ranks hold the vocabulary in rank order, without gaps.
    """

    group: dist.ProcessGroup
    start: int
    rows: int

    def inputs(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return this rank's inputs of the head: its rows, and `hidden [N, H]` with a gradient summed over the group.

        The gradient of `hidden` is then whole on every rank, those of `weight` and `bias` are this rank's; padding rows
        get 0.
        """
        return _summed(hidden, self), weight[: self.rows], None if bias is None else bias[: self.rows]

    def local_rows(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local row of each target (0 if it is on another rank), and whether it is local, `[N]` each."""
        local = targets - self.start
        inside = (local >= 0) & (local < self.rows)
        return local.where(inside, 0), inside

    def combine(self, normalizers: Tensor, chosen: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Combine this rank's logsumexps, logits of the targets (0 if not local) and entropies, `[N]` each. Collective.

        Returns those of the whole vocabulary.
        """
        of_ranks, chosen, entropies = _all_gather(torch.stack((normalizers, chosen, entropies)), self.group).unbind(1)
        whole = of_ranks.logsumexp(0)
        mean_logits = of_ranks - entropies
        return whole, chosen.sum(0), whole - ((of_ranks - whole).exp() * mean_logits).sum(0)

    def gather_columns(self, columns: Tensor) -> Tensor:
        """Gather `[N, R]` of each rank to `[N, V]` on all. Collective; the gradient is this rank's columns of it."""
        sizes = _all_gather(torch.tensor([columns.shape[1]], device=columns.device), self.group)[:, 0].tolist()
        padded = torch.nn.functional.pad(columns.detach(), (0, max(sizes) - columns.shape[1]))
        parts = [part[:, :size] for part, size in zip(_all_gather(padded, self.group), sizes, strict=True)]
        parts[dist.get_rank(self.group)] = columns  # the only part with a gradient
        return torch.cat(parts, dim=1)


def _summed(hidden: Tensor, shard: VocabularyShard) -> Tensor:
    """Return `hidden`; the backward sums its gradients over the group."""

    def over_group(gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=shard.group)
        return total

    if hidden.requires_grad:
        hidden = hidden.view_as(hidden)
        hidden.register_hook(over_group)
    return hidden


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[ranks, *shape]`: `tensor`, of the same shape on each rank of `group`, from all of them."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)
