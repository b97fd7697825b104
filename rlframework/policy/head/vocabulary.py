"""Parts of the vocabulary: the chunks in which the head computes logits, and the rows of the head that one rank has.

Shapes: N tokens, H hidden size, R rows of the vocabulary V on this rank, T targets of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Maximum number of fp32 logits in memory at once, by type of device: 32 MiB on a CPU, 1 GiB on a GPU.

Each chunk reads the weight of its part of the vocabulary. With whole rows of 151,936 logits, a chunk of 2**23 elements
has 55 tokens and keeps a GPU waiting for memory; one of 2**28 has 1,766.
"""

CHUNK_TOKENS = {"cuda": 1 << 14}
"""Maximum number of tokens of a chunk, by type of device; chunks of other types have whole rows of logits.

A chunk of 2**28 logits reads and writes least as a square: 16,384 tokens, and as many ids of the vocabulary. The
gradient of the weight is then one product for each part of the vocabulary, instead of a sum in fp32 that each chunk
reads and writes.
"""

GPU_SHARE = 256
"""A chunk takes at most this part of a GPU's memory in elements, and so 1/64 of it in bytes."""


def chunk_elements(device: torch.device) -> int:
    """Return the maximum number of logits of a chunk.

    The limit is a share of all memory of a GPU, because what is free differs between runs, and the chunks decide in
    which order gradients are summed.
    """
    elements = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"])
    if device.type == "cuda":
        elements = min(elements, torch.cuda.get_device_properties(device).total_memory // GPU_SHARE)
    return elements


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Return the number of tokens of a chunk with whole rows of logits."""
    return max(1, chunk_elements(device) // vocabulary)


def chunk_shape(tokens: int, vocabulary: int, device: torch.device) -> tuple[int, int]:
    """Return the numbers of tokens and of vocabulary ids of a chunk; see `CHUNK_TOKENS`."""
    rows, most = chunk_rows(vocabulary, device), CHUNK_TOKENS.get(device.type)
    if most is None or tokens <= rows:
        return rows, vocabulary
    rows = min(tokens, most)
    columns = min(vocabulary, chunk_elements(device) // rows)
    # rows of logits that begin at multiples of 128: other strides have slower kernels
    return rows, columns // 128 * 128 or max(1, columns)


@dataclass(frozen=True)
class Chunks:
    """The chunks of a call: each has the logits of some `rows` and some `parts` of this rank's vocabulary.

    `start`: the first id of the vocabulary on this rank. `whole`: it has the whole vocabulary.
    """

    rows: tuple[slice, ...]
    parts: tuple[slice, ...]
    start: int
    whole: bool

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, start: int, *, whole: bool) -> Chunks:
        """Return the chunks of `hidden [N, H]` and `weight [R, H]`, whose first row is the id `start`."""
        sizes = hidden.shape[0], weight.shape[0]
        steps = chunk_shape(*sizes, weight.device)
        rows, parts = (
            tuple(slice(first, min(first + step, size)) for first in range(0, size, step))
            for size, step in zip(sizes, steps, strict=True)
        )
        return cls(rows, parts, start, whole)

    def places(self, targets: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        """Return the place of each target in `part`, and whether it is there; None: all are."""
        if self.whole and len(self.parts) == 1:
            return targets, None
        return _places(targets, self.start + part.start, part.stop - part.start)


def _places(targets: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the place of each target among the `count` ids from `first`, or 0, and whether it is there.

    Both have the shape of `targets`.
    """
    local = targets - first
    inside = (local >= 0) & (local < count)
    return local.where(inside, 0), inside


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
