"""Requests to a model's output head, and `HeadPatch`, which makes the model's forward return the results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlframework.base.errors import NotSupported
from rlframework.policy.head.formula import LogitFormula, without_formula
from rlframework.policy.head.logprobs import chunked_logprobs, scaled_logits, top_logits, whole_logits
from rlframework.policy.head.vocabulary import VocabularyShard

SCORE_WEIGHT = "score.weight"
"""The name, in transformers, of the weight `[1, H]` of a head that gives one number."""


@dataclass(frozen=True)
class HeadRequest:
    """The values that the head computes in each forward.

    `wants`: "logprobs" and optionally "entropy"; or exactly one of "topk", "logits" and "scores" (the heads
    `score` and `value`). `top_k`: number of most likely tokens, for "topk". `token_sets`: the name of a value
    `[b, S', K]` int64 of the microbatch's rows, ids of K tokens at each position, whose log-probabilities are computed
    in addition. `entropy_gradient`: whether the entropy has a gradient, which takes another pass over each chunk of
    logits.
    """

    wants: frozenset[str] = frozenset({"logprobs"})
    temperature: float = 1.0
    top_k: int = 0
    token_sets: str | None = None
    entropy_gradient: bool = False

    @property
    def results(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of one token's value, by the names of `HeadOutput.results`."""
        if "topk" in self.wants:
            return {
                "topk_logits": ((self.top_k,), torch.float32),
                "topk_indices": ((self.top_k,), torch.int64),
                "topk_normalizers": ((), torch.float32),
            }
        if "scores" in self.wants:
            return {"scores": ((), torch.float32)}
        return {name: ((), torch.float32) for name in ("logprobs", "entropy") if name in self.wants}


@dataclass
class HeadOutput:
    """The head's results at the `N` head positions of a microbatch: `[N]` fp32 each, `logits [N, V]`.

    `topk_logits [N, k]` fp32 in descending order, `topk_indices [N, k]` int64, their token ids, and `topk_normalizers
    [N]` fp32, the logsumexp of all logits. `set_logprobs [N, K]` fp32: of the tokens of `HeadRequest.token_sets`.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    logits: Tensor | None = None
    topk_logits: Tensor | None = None
    topk_indices: Tensor | None = None
    topk_normalizers: Tensor | None = None
    set_logprobs: Tensor | None = None
    scores: Tensor | None = None

    def results(self) -> dict[str, Tensor]:
        """Return the results that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def read_head_output(values: Tensor, request: HeadRequest) -> HeadOutput:
    """Split the output of a patched model, returned as its logits `[N, ...]`, into named results."""
    if values.ndim != 2:
        raise RuntimeError(
            f"values of shape {list(values.shape)} are not head values, which have one row per position: the model "
            "ran outside HeadPatch.computing, or its head is not patched"
        )
    if "logits" in request.wants:
        return HeadOutput(logits=values)
    if "topk" in request.wants:
        logits, tokens, normalizers = values.split((request.top_k, request.top_k, 1), 1)
        return HeadOutput(topk_logits=logits, topk_indices=tokens.long(), topk_normalizers=normalizers[:, 0])
    if "scores" in request.wants:
        return HeadOutput(scores=values[:, 0])
    entropy = values[:, -1] if "entropy" in request.wants else None
    if entropy is not None and not request.entropy_gradient:
        entropy = entropy.detach()
    if request.token_sets is None:
        return HeadOutput(values[:, 0], entropy)
    return HeadOutput(values[:, 0], entropy, set_logprobs=values[:, 1 : values.shape[1] - (entropy is not None)])


def local_tensor(weight: Any) -> Any:
    """Return this rank's shard of a `DTensor`; any other tensor, and None, unchanged."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def output_head(model: Any) -> Any:
    """Return the final linear module of `model`, a language model's or a reward model's; else raise `NotSupported`."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    head = getattr(model, "score", None) if head is None else head
    if head is None or not hasattr(head, "weight"):
        raise NotSupported(
            f"{type(model).__name__} has no linear output head; use a causal language model or a reward model"
        )
    return head


class HeadPatch:
    """Makes a model return the head's values instead of logits inside `computing(...)`, and only there.

    The model's `LogitFormula` is part of the values.
    It replaces `lm_head.forward`, because under FSDP2 and ZeRO-3 the head's weight is whole only inside the forward.
    """

    def __init__(self, model: torch.nn.Module, shard: VocabularyShard | None = None) -> None:
        """Patch the head of `model`; see `output_head` and, for language models, `require_known_formula`.

        `shard`: this rank's rows of the head's weight, if a group of ranks shards it.
        """
        head = output_head(model)
        self._original_forward, self._head, self.shard = head.forward, head, shard
        self._model, self._formula = model, LogitFormula.of(model)
        self.wanted: tuple[HeadRequest, Tensor, Tensor] | None = None  # request, positions, targets
        head.forward = self._forward

    @contextmanager
    def computing(self, request: HeadRequest, positions: Tensor, targets: Tensor) -> Iterator[None]:
        """Context manager: forwards compute `request` at the flat input `positions [N]`, for `targets [N]`.

        With `request.token_sets` the targets are `[N, 1 + K]`, as `Microbatch.targets` are.
        """
        self.wanted = request, positions, targets
        try:
            with without_formula(self._model):
                yield
        finally:
            self.wanted = None

    def _forward(self, hidden: Tensor) -> Tensor:
        if self.wanted is None:
            logits: Tensor = self._original_forward(hidden)
            return logits
        request, positions, targets = self.wanted
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)
        weight, bias = local_tensor(self._head.weight), local_tensor(getattr(self._head, "bias", None))
        return self.values(request, rows, weight, bias, targets)

    def values(
        self, request: HeadRequest, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> Tensor:
        """Return what `request` wants of the hidden states `rows [N, H]`, as `read_head_output` splits it."""
        if "scores" in request.wants:
            return scaled_logits(rows, weight, bias, 1.0)
        # softcap * tanh(factor * x / softcap) / temperature, as x divided by two other numbers
        factor, softcap = self._formula.factor, self._formula.softcap
        temperature, softcap = request.temperature / factor, None if softcap is None else softcap / factor
        if "topk" in request.wants:
            return top_logits(rows, weight, bias, self.shard, request.top_k, temperature, softcap)
        if "logits" in request.wants:
            return whole_logits(rows, weight, bias, self.shard, temperature=temperature, softcap=softcap)
        logprobs, entropy = chunked_logprobs(
            rows,
            weight,
            bias,
            targets,
            self.shard,
            temperature=temperature,
            softcap=softcap,
            wants_entropy="entropy" in request.wants,
            entropy_gradient=request.entropy_gradient,
        )
        # a new tensor, not a view: FSDP2 attaches its backward hook to the model's output
        columns = logprobs if logprobs.ndim == 2 else logprobs[:, None]
        return torch.cat((columns,) if entropy is None else (columns, entropy[:, None]), dim=1)
