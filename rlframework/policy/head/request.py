"""Requests to a model's output head, and its results: log-probabilities, entropies, top-k, logits or scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadRequest:
    """The values that the head computes in each forward.

    `wants`: "logprobs" and optionally "entropy"; or exactly one of "topk", "logits" and "scores" (a reward model's
    head). `top_k`: number of most likely tokens, for "topk".
    """

    wants: frozenset[str] = frozenset({"logprobs"})
    temperature: float = 1.0
    top_k: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the patched head's output, in order."""
        return ("logprobs", "entropy") if "entropy" in self.wants else ("logprobs",)

    @property
    def results(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of one token's value, by the names of `HeadOutput.results`."""
        if "topk" in self.wants:
            return {"topk_logits": ((self.top_k,), torch.float32), "topk_indices": ((self.top_k,), torch.int64)}
        if "scores" in self.wants:
            return {"scores": ((), torch.float32)}
        return dict.fromkeys(self.columns, ((), torch.float32))


@dataclass
class HeadOutput:
    """The head's results at the `N` head positions of a microbatch: `[N]` fp32 each, `logits [N, V]`.

    `topk_logits [N, k]` fp32 in descending order, and `topk_indices [N, k]` int64, their token ids.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    logits: Tensor | None = None
    topk_logits: Tensor | None = None
    topk_indices: Tensor | None = None
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
        logits, tokens = values.split(request.top_k, 1)
        return HeadOutput(topk_logits=logits, topk_indices=tokens.long())
    if "scores" in request.wants:
        return HeadOutput(scores=values[:, 0])
    columns = {name: values[:, index] for index, name in enumerate(request.columns)}
    if "entropy" in columns:
        columns["entropy"] = columns["entropy"].detach()
    return HeadOutput(**columns)
