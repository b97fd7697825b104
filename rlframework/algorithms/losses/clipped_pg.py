"""The clipped policy-gradient loss of PPO and GRPO, with its common options.

Ratio clipping with separate bounds (DAPO, arXiv:2503.14476), dual clip (arXiv:1912.09729), token- or sequence-level
mean, a KL penalty to a reference policy, and truncated importance weights that correct for the difference between
trainer and generator (https://fengyao.notion.site/off-policy-rl).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlframework.algorithms.losses.kl import kl_divergence
from rlframework.algorithms.losses.masks import loss_mask, sequence_mean, token_mean
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.interfaces.loss import LossInput, LossType


class ClippedPGLoss:
    """-min(ratio * A, clip(ratio) * A), averaged by global counts, plus `kl_coef` times the KL to the reference.

    Reads these values of `data`, all `[B, S]` and aligned with `input_ids`:

    - `advantages`;
    - `prev_logprobs` of the policy before training on the batch; if absent, the batch is on-policy, and the ratio is 1
      with the gradient of the log-probability;
    - `generation_logprobs` of the engine that sampled; if absent, no mismatch metrics and no importance correction;
    - `reference_policy_logprobs`, if `kl_coef` > 0.
    """

    input_type = LossInput.LOGPROBS
    wants_entropy = True
    at_sampling_temperature = True

    def __init__(self, config: ClippedPGLossConfig) -> None:
        self.config = config
        self.loss_type = LossType.TOKEN_LEVEL if config.level == "token" else LossType.SEQUENCE_LEVEL

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """See `LossFunction`."""
        mask = loss_mask(data, next_token_logprobs.dtype)

        def mean(values: Tensor) -> Tensor:
            if self.loss_type == LossType.TOKEN_LEVEL:
                return token_mean(values, mask, global_valid_toks)
            return sequence_mean(values, mask, global_valid_seqs)

        current = next_token_logprobs.detach()
        previous = data["prev_logprobs"][:, 1:] if "prev_logprobs" in data else current
        ratio = (next_token_logprobs - previous).exp()
        surrogate, clipped = self._surrogate(ratio, data["advantages"][:, 1:])
        weights, mismatch = self._mismatch(previous, data, mask, global_valid_toks)
        policy_loss = mean(surrogate * weights)
        kl = self._kl(next_token_logprobs, data)
        loss = policy_loss + self.config.kl_coef * mean(kl) if self.config.kl_coef else policy_loss
        with torch.no_grad():
            metrics = {
                "policy_loss": policy_loss.detach(),
                "clip_fraction": token_mean(clipped.float(), mask, global_valid_toks),
                "ratio": token_mean(ratio.detach(), mask, global_valid_toks),
                "num_valid_samples": data["sample_mask"].sum(),
                **mismatch,
            }
            if self.config.kl_coef:
                metrics["kl"] = token_mean(kl.detach(), mask, global_valid_toks)
            if "entropy" in data:
                metrics["entropy"] = token_mean(data["entropy"], mask, global_valid_toks)
        return loss, metrics

    def _surrogate(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, and a mask of the tokens whose gradient was clipped."""
        config = self.config
        bounded = ratio.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)
        plain, limited = -advantages * ratio, -advantages * bounded
        loss, clipped = torch.maximum(plain, limited), limited > plain
        if config.ratio_clip_c is not None:  # bounds the loss of a token with negative advantage and a large ratio
            ceiling = -advantages * config.ratio_clip_c
            beyond = (advantages < 0) & (loss > ceiling)
            loss, clipped = torch.where(beyond, ceiling, loss), clipped | beyond
        return loss, clipped

    def _mismatch(
        self, trainer_logprobs: Tensor, data: BatchedDataDict[Any], mask: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        """Return importance weights for the mismatch between generator and trainer, and metrics of the mismatch."""
        if "generation_logprobs" not in data:
            return 1.0, {}
        difference = (trainer_logprobs - data["generation_logprobs"][:, 1:]) * mask
        metrics = {
            "generation_kl": token_mean(
                kl_divergence(-difference, torch.zeros_like(difference), "k3"), mask, global_valid_toks
            ),
            "generation_logprob_difference": token_mean(difference.abs(), mask, global_valid_toks),
            "generation_logprob_difference_max": difference.abs().max(),
        }
        if self.config.importance_correction == "none":
            return 1.0, metrics
        weights = difference.exp()
        metrics["importance_weight"] = token_mean(weights, mask, global_valid_toks)
        metrics["importance_truncated_fraction"] = token_mean(
            (weights > self.config.importance_cap).float(), mask, global_valid_toks
        )
        return weights.clamp(max=self.config.importance_cap), metrics

    def _kl(self, next_token_logprobs: Tensor, data: BatchedDataDict[Any]) -> Tensor:
        if not self.config.kl_coef:
            return torch.zeros_like(next_token_logprobs)
        return kl_divergence(next_token_logprobs, data["reference_policy_logprobs"][:, 1:], self.config.kl_estimator)
