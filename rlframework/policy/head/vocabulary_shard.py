"""The rows of an output head that one rank has, and the exchange of softmax statistics between ranks.

Shapes: N tokens, H hidden size, R rows of the vocabulary V on this rank, T targets of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows of the head in `group`: `rows` rows from id `start`, in rank order and without gaps.

    Further rows of its weight only pad the vocabulary and are excluded from the softmax. The ranks exchange three
    numbers per token in the forward, and the gradient of the hidden states in the backward.
    """

    group: dist.ProcessGroup
    start: int
    rows: int

    def inputs(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return this rank's inputs of the head: its rows, and `hidden [N, H]` with a gradient summed over the group.

        Gradients of `weight` and `bias` are this rank's; padding rows get 0.
        """
        return self.with_summed_gradient(hidden), weight[: self.rows], None if bias is None else bias[: self.rows]

    def with_summed_gradient(self, hidden: Tensor) -> Tensor:
        """Return `hidden`; the backward sums its gradients over the group."""

        def over_group(gradient: Tensor) -> Tensor:
            total = gradient.contiguous().clone()
            dist.all_reduce(total, group=self.group)
            return total

        if hidden.requires_grad:
            hidden = hidden.view_as(hidden)
            hidden.register_hook(over_group)
        return hidden

    def combine(self, normalizers: Tensor, chosen: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of the whole vocabulary from each rank's, `[N]` each. Collective.

        `chosen`: the logits of the targets, in their shape, 0 if not local; `normalizers`: logsumexps.
        """
        statistics = torch.cat((normalizers[:, None], entropies[:, None], columns_of(chosen)), 1)
        gathered = _all_gather(statistics, self.group)
        return combined_statistics(
            gathered[..., 0], gathered[..., 2:].reshape(len(gathered), *chosen.shape), gathered[..., 1]
        )

    def gather_columns(self, columns: Tensor) -> Tensor:
        """Gather `[N, R]` of each rank to `[N, V]` on all. Collective; the gradient is this rank's columns of it."""
        sizes = _all_gather(torch.tensor([columns.shape[1]], device=columns.device), self.group)[:, 0].tolist()
        padded = torch.nn.functional.pad(columns.detach(), (0, max(sizes) - columns.shape[1]))
        parts = [part[:, :size] for part, size in zip(_all_gather(padded, self.group), sizes, strict=True)]
        parts[dist.get_rank(self.group)] = columns  # the only part with a gradient
        return torch.cat(parts, dim=1)


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[ranks, *shape]`: `tensor`, of the same shape on each rank."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)


def combined_statistics(normalizers: Tensor, chosen: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the statistics of the whole vocabulary from those of its parts, `[parts, N]` each.

    `chosen` has further dimensions if there are several targets.
    """
    whole = normalizers.logsumexp(0)
    mean_logits = normalizers - entropies
    return whole, chosen.sum(0), whole - ((normalizers - whole).exp() * mean_logits).sum(0)


def columns_of(values: Tensor) -> Tensor:
    """Return `values [n]` or `[n, T]` with two dimensions."""
    return values if values.ndim == 2 else values[:, None]
