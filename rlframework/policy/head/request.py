"""The request to a model's output head and what comes back: log-probabilities, entropies, top-k, logits or scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
