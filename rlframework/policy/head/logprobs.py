"""Log-probabilities, top-k tokens and logits from hidden states, with a whole head or one sharded over the vocabulary.

Log-probabilities and top-k tokens are computed in chunks, without ever materializing all fp32 logits
`[tokens, vocabulary]`; a hand-written backward recomputes the logits of each chunk. Logits are fp32 sums of products:
rounding them to bfloat16 on the way would change log-probabilities, and so importance ratios, by up to 7e-3.

Shapes: N requested tokens, n tokens of a chunk, H hidden size, V vocabulary, R rows of it on this rank. With a `shard`,
`weight` and `bias` are this rank's rows, all ranks pass the same `hidden` and `targets` and get the same results, and
the calls are collective; for gradients see `VocabularyShard.inputs`.

The targets of a token may also be several, `[N, T]`: log-probabilities are then `[N, T]`, of one softmax.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor

from rlframework.base.errors import BatchError
from rlframework.policy.head.vocabulary import Chunks, VocabularyShard, chunk_rows, columns_of, combined_statistics

_LOG = logging.getLogger(__name__)


class Compiled:
    """`function`, compiled at its first call; uncompiled, with a warning, where the compiler fails.

    On a GPU Inductor needs Triton, a C compiler and Python's headers, which a machine for inference may lack.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._current = function, torch.compile(function, dynamic=True)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function. Raises what it raises itself, and `torch.OutOfMemoryError`."""
        try:
            return self._current(*arguments)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError, SubprocessError) as error:
            if self._current is self._function:
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            _LOG.warning(
                "The head's log-probabilities are computed without compiled kernels, which is slower: install a C "
                "compiler and the headers of Python (gcc, python3-dev), or check Triton. torch.compile said: %s",
                reason,
            )
            self._current = self._function
            return self._function(*arguments)  # the compiled functions leave their arguments alone


COMPILED = {"cuda"}
"""Types of devices on which the elementwise operations of a chunk are compiled, to read its logits once for all."""


def scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None = None
) -> Tensor:
    """Return the fp32 logits `[N, V]` of `hidden [N, H]`, divided by `temperature`.

    Before that they become `softcap * tanh(logits / softcap)`, if given. A model's own factor of its logits is part of
    both numbers: see `HeadPatch`.
    """
    hidden, weight, bias = _factors(hidden, weight, bias)
    if weight.dtype == torch.float32:
        logits = torch.nn.functional.linear(hidden, weight, bias)
    else:
        logits = _HalfPrecisionLinear.apply(hidden, weight)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        logits = logits if bias is None else logits + bias
    if softcap is not None:
        return torch.tanh(logits / softcap) * (softcap / temperature)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _factors(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what is multiplied: on a CPU in fp32, because its products have the dtype of their factors."""
    if weight.device.type != "cpu":
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
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shard: VocabularyShard | None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Return the whole logits `[N, V]` fp32 on every rank, for losses that need them."""
    if shard is None:
        return scaled_logits(hidden, weight, bias, temperature, softcap)
    return shard.gather_columns(scaled_logits(*shard.inputs(hidden, weight, bias), temperature, softcap))


@torch.no_grad()
def top_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shard: VocabularyShard | None,
    k: int,
    temperature: float,
    softcap: float | None = None,
) -> Tensor:
    """Return `[N, 2 k + 1]` fp32: the k largest logits of `hidden [N, H]` at `temperature`, their token ids, and the
    logsumexp of all logits.

    fp32 represents every id below 2**24 exactly. Raises a `BatchError` if k exceeds the vocabulary.
    """
    hidden, weight, bias = _factors(hidden, weight, bias)
    chunks = []
    for rows in hidden.split(chunk_rows(weight.shape[0], weight.device)):
        logits = whole_logits(rows, weight, bias, shard, temperature=temperature, softcap=softcap)
        if k > logits.shape[1]:
            raise BatchError(f"k is {k}, but the model has {logits.shape[1]} tokens")
        values, tokens = logits.topk(k, -1)
        chunks.append(torch.cat((values, tokens.to(values.dtype), logits.logsumexp(-1, keepdim=True)), 1))
    return torch.cat(chunks)


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    shard: VocabularyShard | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    wants_entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log p(target) of each row and, on request, the entropy of its distribution.

    `hidden [N, H]`, `weight [V, H]`, `bias [V]`, `targets` int64, `[N]` or `[N, T]`; returns log-probabilities of that
    shape and entropies `[N]`, fp32. Gradients flow through the log-probabilities, and with `entropy_gradient` through
    the entropies, to `hidden`, `weight` and `bias`. `softcap`: see `scaled_logits`.
    """
    if shard is not None:
        hidden, weight, bias = shard.inputs(hidden, weight, bias)
    elif hidden.shape[0] <= chunk_rows(weight.shape[0], weight.device) and weight.device.type not in COMPILED:
        # one chunk: torch's kernel, which keeps the logits for the backward
        logits = scaled_logits(hidden, weight, bias, temperature, softcap)
        if targets.ndim == 1:
            logprobs = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        else:
            logprobs = logits.log_softmax(-1).gather(1, targets)
        entropy = None
        if wants_entropy:
            with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
                entropy = _entropy_of(logits, logits.logsumexp(-1))
        return logprobs, entropy
    logprobs, entropies = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        hidden, weight, bias, targets, shard, temperature, softcap, wants_entropy, entropy_gradient
    )
    return logprobs, entropies if wants_entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probabilities, in the shape of the targets, and entropies, `[N]`.

    With a shard, `hidden` gets this rank's term of the gradient.
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
        softcap: float | None,
        wants_entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        chunks = Chunks.of(hidden, weight, 0 if shard is None else shard.start, whole=shard is None)
        factors, statistics = _factors(hidden, weight, bias), _compiled(_token_statistics, weight.device)
        found = torch.zeros(2, len(chunks.parts), hidden.shape[0], dtype=torch.float32, device=hidden.device)
        found_chosen = found.new_zeros(len(chunks.parts), *targets.shape)
        for number, part in enumerate(chunks.parts):
            part_factors = _rows_of(factors, part)
            for rows in chunks.rows:
                places, inside = chunks.places(targets[rows], part)
                # no name for the logits, so that they are freed before those of the next chunk are made
                normalizers, chosen, entropies = statistics(
                    scaled_logits(factors[0][rows], *part_factors, temperature, softcap), places, wants_entropy
                )
                found[0, number, rows] = normalizers
                found_chosen[number, rows] = chosen if inside is None else chosen.where(inside, 0.0)
                if entropies is not None:
                    found[1, number, rows] = entropies
        if len(chunks.parts) == 1:
            normalizers, chosen, entropies = found[0, 0], found_chosen[0], found[1, 0]
        else:
            normalizers, chosen, entropies = combined_statistics(found[0], found_chosen, found[1])
        if shard is not None:
            normalizers, chosen, entropies = shard.combine(normalizers, chosen, entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, entropies if entropy_gradient else None)
        ctx.temperature, ctx.softcap, ctx.chunks = temperature, softcap, chunks
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return chosen - normalizers.view(-1, *[1] * (targets.ndim - 1)), entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *_ = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        factors = _factors(hidden, weight, bias)
        dtype = factors[1].dtype
        made = torch.empty_like if chunks.rows else torch.zeros_like
        grad_hidden = made(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = made(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        hidden_sums = _sums(grad_hidden, dtype, len(chunks.parts))
        for part in chunks.parts:
            part_factors = _rows_of(factors, part)
            part_gradient = None if grad_weight is None else grad_weight[part]
            weight_sums = _sums(part_gradient, dtype, len(chunks.rows))
            for rows in chunks.rows:
                slope = _slope(ctx, grads, factors[0][rows], part_factors, rows, part)
                if grad_bias is not None:
                    grad_bias[part] += slope.sum(0, dtype=torch.float32)
                if hidden_sums is not None:
                    _add_product(hidden_sums[rows], slope, part_factors[0], first=part is chunks.parts[0])
                if weight_sums is not None:
                    _add_product(weight_sums, slope.T, factors[0][rows], first=rows is chunks.rows[0])
                del slope  # before the next one is made
            _write(part_gradient, weight_sums)
        _write(grad_hidden, hidden_sums)
        return grad_hidden, grad_weight, None if grad_bias is None else grad_bias.to(bias.dtype), *[None] * 6


def _slope(
    ctx: Any,
    grads: tuple[Tensor, ...],
    hidden: Tensor,
    factors: tuple[Tensor, Tensor | None],
    rows: slice,
    part: slice,
) -> Tensor:
    """Return the gradient of a chunk's logits, in the dtype of its factors; see `_gradient_of_logits`."""
    *_, targets, normalizers, entropies = ctx.saved_tensors
    gradient = _compiled(_gradient_of_logits, hidden.device)
    target_scale = grads[0][rows] / ctx.temperature
    of_entropy = None if entropies is None else (entropies[rows], grads[1][rows] / ctx.temperature)
    scale = target_scale if target_scale.ndim == 1 else target_scale.sum(1)
    places, inside = ctx.chunks.places(targets[rows], part)
    # a target that is elsewhere has place 0, which must not get the target's gradient
    target_scale = target_scale if inside is None else target_scale * inside
    logits = scaled_logits(hidden, *factors, ctx.temperature, ctx.softcap)
    # d tanh(x) = 1 - tanh(x)^2; before the gradient, which overwrites the logits
    of_cap = None if ctx.softcap is None else 1.0 - (logits * (ctx.temperature / ctx.softcap)).square()
    dtype = hidden.dtype if of_cap is None else torch.float32
    slope: Tensor = gradient(logits, normalizers[rows], places, scale, target_scale, of_entropy, dtype)
    return slope if of_cap is None else (slope * of_cap).to(hidden.dtype)


def _rows_of(factors: tuple[Tensor, Tensor, Tensor | None], part: slice) -> tuple[Tensor, Tensor | None]:
    _, weight, bias = factors
    return weight[part], None if bias is None else bias[part]


def _sums(gradient: Tensor | None, dtype: torch.dtype, products: int) -> Tensor | None:
    """Return where the `products` of `dtype` in `gradient` are summed: in fp32, or there if that rounds once."""
    if gradient is None or gradient.dtype == torch.float32 or (products == 1 and dtype == gradient.dtype):
        return gradient
    return torch.empty_like(gradient, dtype=torch.float32)


def _write(gradient: Tensor | None, sums: Tensor | None) -> None:
    """Round `sums` to `gradient`, unless they are the same."""
    if gradient is not None and sums is not None and sums is not gradient:
        gradient.copy_(sums)


def _compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return `function`, compiled where that saves reading the logits again for each operation."""
    return _compile(function) if device.type in COMPILED else function


_compile = cache(Compiled)


def _token_statistics(logits: Tensor, targets: Tensor, wants_entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the logsumexp, the logits of the targets and, on request, the entropy of each row of `logits [n, V]`."""
    normalizer = logits.logsumexp(-1)
    chosen = logits.gather(1, columns_of(targets)).view(targets.shape)
    return normalizer, chosen, _entropy_of(logits, normalizer) if wants_entropy else None


def _gradient_of_logits(
    logits: Tensor,
    normalizers: Tensor,
    targets: Tensor,
    scale: Tensor,
    target_scale: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return `target_scale * onehot(target) - scale * softmax`, `[n, V]` in `dtype`; overwrites `logits`.

    It is `scale` times d logprob / d logits. Several targets of a row, `[n, T]`, have a `target_scale` each; `scale`
    is then their sum. `of_entropy`: entropies and the scale of their gradient, `[n]` each, which is added:
    d entropy / d logits = -softmax * (log softmax + entropy).
    """
    if of_entropy is not None:
        entropies, entropy_scale = of_entropy
        logprobs = logits - normalizers[:, None]
        factor = torch.addcmul(scale[:, None], entropy_scale[:, None], logprobs + entropies[:, None])
        slope = (logprobs.exp() * -factor).scatter_add(1, columns_of(targets), columns_of(target_scale))
    elif not torch.compiler.is_compiling():
        slope = logits.sub_(normalizers[:, None]).exp_().mul_(-scale[:, None])
        slope.scatter_add_(1, columns_of(targets), columns_of(target_scale))
    elif targets.ndim == 1:  # without writing the logits back
        is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
        slope = is_target * target_scale[:, None] - (logits - normalizers[:, None]).exp() * scale[:, None]
    else:
        slope = (logits - normalizers[:, None]).exp() * -scale[:, None]
        slope = slope.scatter_add(1, targets, target_scale)
    return slope.to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """Add `left @ right` to `total` without rounding the product to half precision; overwrite `total` if `first`."""
    if first and total.dtype == left.dtype:
        torch.mm(left, right, out=total)
    elif left.dtype == torch.float32:
        total += left @ right
    else:
        torch.addmm(total, left, right, beta=0 if first else 1, out_dtype=torch.float32, out=total)


def _entropy_of(logits: Tensor, normalizer: Tensor) -> Tensor:
    """Return the entropy `[N]` in nats of the softmax of `logits [N, V]`, whose logsumexp is `normalizer [N]`."""
    probabilities = (logits - normalizer[:, None]).exp_()
    mean_logit: Tensor = torch.linalg.vecdot(probabilities, logits)
    return normalizer - mean_logit
