"""The check of sampled tokens in a worker, before it takes a step: how far the engine's log-probabilities are off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlframework.interfaces.loss import LossFunction, LossInput
from rlframework.interfaces.policy_worker import SAMPLED_NOW, Rows, SampledDifference, SamplingBound

_SUM, _COUNT, _LARGEST = "sampled_difference", "sampled_tokens", "sampled_difference_max"


@dataclass(frozen=True)
class SampledTokensCheck:
    """Compares the log-probabilities of sampled tokens in a global batch with those of the engine.

    The loss has the policy's anyway, so this costs three operations on `[B, S]` for each microbatch, and that the host
    waits for the backward pass before it asks for the optimizer step.
    """

    bound: SamplingBound

    @classmethod
    def of(
        cls, bound: SamplingBound | None, data: Rows, loss: LossFunction, *, same_temperature: bool
    ) -> SampledTokensCheck | None:
        """Return the check with `bound`, or None where the loss gets no log-probabilities to compare."""
        comparable = same_temperature and loss.input_type in (LossInput.LOGPROBS, LossInput.TOKEN_SETS)
        return cls(bound) if bound is not None and comparable and "generation_logprobs" in data else None

    @staticmethod
    def metrics(logprobs: Tensor, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the sums of a microbatch. `logprobs`: `[b, S-1]`, or `[b, S-1, 1 + K]` with those of token sets."""
        current = logprobs.detach() if logprobs.ndim == 2 else logprobs.detach()[..., 0]
        before = data["prev_logprobs"][:, 1:] if "prev_logprobs" in data else current  # of the weights that sampled
        counted = (data["token_mask"][:, 1:] != 0) & (data["sample_mask"][:, None] != 0)
        if SAMPLED_NOW in data:
            counted = counted & (data[SAMPLED_NOW][:, 1:] != 0)
        size = torch.where(counted, (before - data["generation_logprobs"][:, 1:]).abs(), 0.0)
        return {_SUM: size.sum(), _COUNT: counted.sum(), _LARGEST: size.max()}

    def of_batch(self, metrics: dict[str, float]) -> SampledDifference:
        """Take the sums over all microbatches out of `metrics`, and compare them with the bound."""
        total, count, largest = (metrics.pop(name, 0.0) for name in (_SUM, _COUNT, _LARGEST))
        mean = total / max(count, 1.0)
        return SampledDifference(mean, largest, count, mean > self.bound.mean or largest > self.bound.largest)
