"""Log-probabilities from hidden states, chunk by chunk: `[tokens, vocabulary]` in fp32 is never held whole.

`chunked_logprobs` is the function, with a backward written by hand that recomputes each chunk. `HeadPatch` puts it in
place of `lm_head.forward`, because under FSDP2 and ZeRO-3 the head's weight is whole only inside the model's forward.

Shapes: N wanted tokens, H hidden size, V vocabulary. Heads whose rows several ranks share: `head_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.errors import NotSupported

if TYPE_CHECKING:
    from rlframework.policy.head_parallel import VocabularyShard

CHUNK_ELEMENTS = 1 << 23
"""Most fp32 logits held at once: 32 MiB."""


@dataclass(frozen=True)
class HeadRequest:
    """What the head computes in each forward: `wants` holds "logprobs" and "entropy", or alone "topk", "logits" or
    "scores" (of a reward model's head).

    `top_k`: how many of the likeliest tokens.
    """

    wants: frozenset[str] = frozenset({"logprobs"})
    temperature: float = 1.0
    top_k: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """Order of the columns in what the patched head returns."""
        return ("logprobs", "entropy") if "entropy" in self.wants else ("logprobs",)

    @property
    def results(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape of one token's value, and dtype, by the names in `HeadOutput.results`."""
        if "topk" in self.wants:
            return {"topk_logits": ((self.top_k,), torch.float32), "topk_indices": ((self.top_k,), torch.int64)}
        if "scores" in self.wants:
            return {"scores": ((), torch.float32)}
        return dict.fromkeys(self.columns, ((), torch.float32))


@dataclass
class HeadOutput:
    """What the head computed at the `N` head positions of a microbatch: `[N]` fp32 each, `logits [N, V]`.

    `topk_logits [N, k]` fp32, largest first, and `topk_indices [N, k]` int64, the tokens that they are of.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    logits: Tensor | None = None
    topk_logits: Tensor | None = None
    topk_indices: Tensor | None = None
    scores: Tensor | None = None

    def results(self) -> dict[str, Tensor]:
        """What is there, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def chunk_rows(vocabulary: int) -> int:
    """Tokens whose logits are held at once."""
    return max(1, CHUNK_ELEMENTS // vocabulary)


def scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """fp32 logits `[N, V]` of `hidden [N, H]` at `temperature`."""
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
            part = slice(start, start + rows)
            logits = scaled_logits(hidden[part], weight, bias, temperature)
            normalizer = logits.logsumexp(-1)
            normalizers[part] = normalizer
            logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normalizer
            if wants_entropy:
                entropy[part] = entropy_of(logits, normalizer)
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
            part = slice(start, start + rows)
            scale = grad[part, None] / ctx.temperature
            logits = scaled_logits(hidden[part], weight, bias, ctx.temperature)
            # d logprob / d logits = onehot(target) - softmax: -softmax * scale, and + scale at the target
            slope = logits.sub_(normalizers[part, None]).exp_().mul_(-scale)
            slope.scatter_add_(1, targets[part, None], scale)
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            slope = slope.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = slope @ weight
            if grad_weight is not None:
                grad_weight += slope.T @ hidden[part]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def entropy_of(logits: Tensor, normalizer: Tensor) -> Tensor:
    """Entropy `[N]` in nats of the softmax of `logits [N, V]` whose logsumexp is `normalizer [N]`."""
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
    """log p(target) of each row, and the entropy of its distribution if asked for.

    `hidden [N, H]`, `weight [V, H]`, `bias [V]`, `targets [N]` int64; returns `[N]` fp32 each. The gradient flows
    through the log-probabilities to `hidden`, `weight` and `bias`; the entropy has none.
    """
    if hidden.shape[0] <= chunk_rows(
        weight.shape[0]
    ):  # one chunk: the fused kernel, which saves what we would recompute
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


def own_rows(weight: Any) -> Any:
    """The rows of a `DTensor` that are on this rank; any other tensor as it is, and None."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def output_head(model: Any) -> Any:
    """The linear module that ends `model`: of a language model, or `score` of a reward model; else `NotSupported`."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    head = getattr(model, "score", None) if head is None else head
    if head is None or not hasattr(head, "weight"):
        raise NotSupported(
            f"{type(model).__name__} has no linear output head; take a causal language model, or a reward model"
        )
    return head


class HeadPatch:
    """Replaces `lm_head.forward`: inside `computing(...)` the model returns the head's values instead of logits.

    Outside it the head is the ordinary one, so that generation and anything else can use the model as it is.
    """

    def __init__(self, model: torch.nn.Module, shard: VocabularyShard | None = None) -> None:
        """`model`: see `output_head` and, for language models, `require_plain_head`.

        `shard`: which rows of the head's weight are here, where a group of ranks holds them together.
        """
        head = output_head(model)
        self._ordinary = head.forward
        self._head = head
        self._shard = shard
        self._request: HeadRequest | None = None
        self._positions: Tensor | None = None
        self._targets: Tensor | None = None
        head.forward = self._forward

    @contextmanager
    def computing(self, request: HeadRequest, positions: Tensor, targets: Tensor) -> Iterator[None]:
        """Within it, forwards compute `request` at flat `positions [N]` of the input for `targets [N]`."""
        self._request, self._positions, self._targets = request, positions, targets
        try:
            yield
        finally:
            self._request = self._positions = self._targets = None

    def _forward(self, hidden: Tensor) -> Tensor:
        if self._request is None or self._positions is None or self._targets is None:
            logits: Tensor = self._ordinary(hidden)
            return logits
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._positions)
        weight, bias = own_rows(self._head.weight), own_rows(getattr(self._head, "bias", None))
        return self._values(self._request, rows, weight, bias, self._targets)

    def _values(
        self, request: HeadRequest, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> Tensor:
        # these import this module
        from rlframework.policy.head_parallel import parallel_logits, parallel_logprobs
        from rlframework.policy.head_topk import top_logits

        if "scores" in request.wants:
            return scaled_logits(rows, weight, bias, 1.0)
        temperature, wants_entropy = request.temperature, "entropy" in request.wants
        if "topk" in request.wants:
            return top_logits(rows, weight, bias, self._shard, request.top_k, temperature)
        if "logits" in request.wants:
            if self._shard is not None:
                return parallel_logits(rows, weight, bias, self._shard, temperature=temperature)
            return scaled_logits(rows, weight, bias, temperature)
        if self._shard is not None:
            logprobs, entropy = parallel_logprobs(
                rows, weight, bias, targets, self._shard, temperature=temperature, wants_entropy=wants_entropy
            )
        else:
            logprobs, entropy = chunked_logprobs(
                rows, weight, bias, targets, temperature=temperature, wants_entropy=wants_entropy
            )
        # a new tensor, not a view: FSDP2 hangs its hook for the backward on what the model returns
        return torch.stack((logprobs,) if entropy is None else (logprobs, entropy), dim=1)


@torch.no_grad()
def require_plain_head(model: Any) -> None:
    """`NotSupported` when `model` changes its logits after its head (soft-capping, a scale).

    Replacing the head would then give wrong log-probabilities without an error. Tried on a few tokens, because the
    names of such settings differ from model to model. `model` is whole and lies on one device.
    """
    seen: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        logits = model(input_ids=probe_ids(model)[None], use_cache=False).logits
    finally:
        handle.remove()
    if len(seen) != 1 or seen[0].shape != logits.shape or not torch.equal(seen[0], logits):
        raise NotSupported(
            f"{type(model).__name__} changes its logits after the output head, which is not supported yet; "
            "take a model whose logits are the head's"
        )


def probe_ids(model: Any) -> Tensor:
    """A few different token ids `[6]` that `model` knows, on its device."""
    embedding = model.get_input_embeddings().weight
    return torch.linspace(0, embedding.shape[0] - 1, 6, device=embedding.device).long()


def read_head_output(values: Tensor, request: HeadRequest) -> HeadOutput:
    """Name the columns of what a patched model returned as its logits, `[N, ...]`."""
    if values.ndim != 2:
        raise RuntimeError(
            f"values of shape {list(values.shape)} are not the head's, which are a row for each position: the model "
            "ran outside HeadPatch.computing, or its head is not under HeadPatch"
        )
    if "logits" in request.wants:
        return HeadOutput(logits=values)
    if "topk" in request.wants:
        logits, tokens = values.split(request.top_k, 1)
        return HeadOutput(topk_logits=logits, topk_indices=tokens.long())
    if "scores" in request.wants:
        return HeadOutput(scores=values[:, 0])
    columns = {name: values[:, index] for index, name in enumerate(request.columns)}
    if "entropy" in columns:
        columns["entropy"] = columns["entropy"].detach()
    return HeadOutput(**columns)
