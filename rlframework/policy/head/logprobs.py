"""Log-probabilities, top-k tokens and logits from hidden states, with a whole head or one sharded over the vocabulary.

Log-probabilities and top-k tokens are computed in chunks, without ever materializing all fp32 logits
`[tokens, vocabulary]`; a hand-written backward recomputes the logits of each chunk. Logits are fp32 sums of products:
rounding them to bfloat16 on the way would change log-probabilities, and so importance ratios, by up to 7e-3.

Shapes: N requested tokens, n tokens of a chunk, H hidden size, V vocabulary, R rows of it on this rank. With a `shard`,
`weight` and `bias` are this rank's rows, all ranks pass the same `hidden` and `targets` and get the same results, and
the calls are collective; for gradients see `VocabularyShard.inputs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.errors import BatchError

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Maximum number of fp32 logits in memory at once, by type of device: 32 MiB on a CPU, 1 GiB on a GPU.

Each chunk reads the head's weight and adds to its gradient. At a vocabulary of 151,936, a chunk of 2**23 elements has
55 tokens and keeps a GPU waiting for memory; one of 2**28 has 1,766.
"""

GPU_SHARE = 256
"""A chunk takes at most this part of a GPU's memory in elements, and so 1/64 of it in bytes."""

COMPILED = {"cuda"}
"""Types of devices on which the elementwise operations of a chunk are compiled, to read its logits once for all."""


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

    def local_rows(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local row of each target (0 if it is on another rank), and whether it is local, `[N]` each."""
        local = targets - self.start
        inside = (local >= 0) & (local < self.rows)
        return local.where(inside, 0), inside

    def combine(self, normalizers: Tensor, chosen: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of the whole vocabulary from each rank's, `[N]` each. Collective.

        `chosen`: the logits of the targets, 0 if not local; `normalizers`: logsumexps.
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


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[ranks, *shape]`: `tensor`, of the same shape on each rank."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Return the number of tokens per chunk.

    A chunk takes at most 1/64 of a GPU's memory: of all of it, because what is free differs between runs, and the
    chunks decide in which order gradients are summed.
    """
    elements = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"])
    if device.type == "cuda":
        elements = min(elements, torch.cuda.get_device_properties(device).total_memory // GPU_SHARE)
    return max(1, elements // vocabulary)


def scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return the fp32 logits `[N, V]` of `hidden [N, H]`, divided by `temperature`."""
    hidden, weight, bias = _factors(hidden, weight, bias)
    if weight.dtype == torch.float32:
        logits = torch.nn.functional.linear(hidden, weight, bias)
    else:
        logits = _HalfPrecisionLinear.apply(hidden, weight)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        logits = logits if bias is None else logits + bias
    return logits if temperature == 1.0 else logits.div_(temperature)


def _factors(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what is multiplied: on a CPU in fp32, because its products have the dtype of their factors."""
    if weight.is_cuda:
        return hidden, weight, bias
    return hidden.float(), weight.float(), None if bias is None else bias.float()


class _HalfPrecisionLinear(torch.autograd.Function):
    """The fp32 product `[N, V]` of `hidden [N, H]` and `weight [V, H]` in half precision, on a GPU."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        grad = grads[0].to(weight.dtype)
        return grad @ weight, grad.T @ hidden


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
    hidden, weight, bias = _factors(hidden, weight, bias)
    chunks = []
    for rows in hidden.split(chunk_rows(weight.shape[0], weight.device)):
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
    elif hidden.shape[0] <= chunk_rows(weight.shape[0], weight.device) and weight.device.type not in COMPILED:
        # one chunk: torch's kernel, which keeps the logits for the backward
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
    """Log-probabilities and entropies, `[N]`; with a shard, `hidden` gets this rank's term of the gradient."""

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
        count, rows = hidden.shape[0], chunk_rows(weight.shape[0], weight.device)
        inside = None
        if shard is not None:
            targets, inside = shard.local_rows(targets)
        factors, statistics = _factors(hidden, weight, bias), _compiled(_token_statistics, weight.device)
        normalizers = torch.empty(count, dtype=torch.float32, device=hidden.device)
        chosen, entropies = torch.empty_like(normalizers), torch.zeros_like(normalizers)
        for start in range(0, count, rows):
            chunk = slice(start, start + rows)
            logits = scaled_logits(factors[0][chunk], *factors[1:], temperature)
            normalizers[chunk], chosen[chunk], entropy = statistics(logits, targets[chunk], wants_entropy)
            if entropy is not None:
                entropies[chunk] = entropy
        if shard is not None and inside is not None:
            normalizers, chosen, entropies = shard.combine(normalizers, chosen.where(inside, 0.0), entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, inside, normalizers)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return chosen - normalizers, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, inside, normalizers = ctx.saved_tensors
        rows = chunk_rows(weight.shape[0], weight.device)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        factors, gradient = _factors(hidden, weight, bias), _compiled(_gradient_of_logits, weight.device)
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            scale = grads[0][chunk] / ctx.temperature
            logits = scaled_logits(factors[0][chunk], *factors[1:], ctx.temperature)
            # where the target is on another rank, its row here is 0 and must not get the target's gradient
            target_scale = scale if inside is None else scale * inside[chunk]
            slope = gradient(logits, normalizers[chunk], targets[chunk], scale, target_scale, factors[1].dtype)
            if grad_bias is not None:
                grad_bias += slope.sum(0, dtype=torch.float32)
            if grad_hidden is not None:
                grad_hidden[chunk] = slope @ factors[1]
            if grad_weight is not None:
                _add_product(grad_weight, slope.T, factors[0][chunk])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 4,
        )


def _compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return `function`, compiled where that saves reading the logits again for each operation."""
    return _compile(function) if device.type in COMPILED else function


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _token_statistics(logits: Tensor, targets: Tensor, wants_entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the logsumexp, the logit of the target and, on request, the entropy of each row of `logits [n, V]`."""
    normalizer = logits.logsumexp(-1)
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    return normalizer, chosen, _entropy_of(logits, normalizer) if wants_entropy else None


def _gradient_of_logits(
    logits: Tensor, normalizers: Tensor, targets: Tensor, scale: Tensor, target_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return `target_scale * onehot(target) - scale * softmax`, `[n, V]` in `dtype`; overwrites `logits`.

    It is `scale` times d logprob / d logits.
    """
    if torch.compiler.is_compiling():  # without writing the logits back
        is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
        slope = is_target * target_scale[:, None] - (logits - normalizers[:, None]).exp() * scale[:, None]
    else:
        slope = logits.sub_(normalizers[:, None]).exp_().mul_(-scale[:, None])
        slope.scatter_add_(1, targets[:, None], target_scale[:, None])
    return slope.to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, which is fp32, without rounding the product to half precision."""
    if left.dtype == torch.float32:
        total += left @ right
    else:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


def _entropy_of(logits: Tensor, normalizer: Tensor) -> Tensor:
    """Return the entropy `[N]` in nats of the softmax of `logits [N, V]`, whose logsumexp is `normalizer [N]`."""
    probabilities = (logits - normalizer[:, None]).exp_()
    mean_logit: Tensor = torch.linalg.vecdot(probabilities, logits)
    return normalizer - mean_logit
