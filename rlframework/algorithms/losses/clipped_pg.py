"""The policy-gradient loss of PPO, GRPO and the algorithms derived from it, of which each is a choice of terms.

The terms are in `terms`: means, the ratio of probabilities and the surrogate of it, the KL penalty to a reference
policy, and the weights that correct for the difference between trainer and generator.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlframework.algorithms.losses.terms import (
    SURROGATES,
    bounded_kl,
    importance_weights,
    kl_divergence,
    kl_weight,
    loss_mask,
    mismatch_metrics,
    probability_ratio,
    sequence_mean,
    token_mean,
)
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.interfaces.loss import LossColumn, LossInput, LossType

SEQUENCE_WEIGHTS = "sequence_weights"
"""The column of the weights of rows in means over sequences."""


class ClippedPGLoss:
    """A surrogate of ratio and advantage, by default -min(ratio * A, clip(ratio) * A), averaged by global counts.

    Plus `kl_coef` times the KL to the reference, minus `entropy_coef` times the entropy. A sequence is a row: of
    episodes with several rows, ratios and weights of sequences are those of each row.

    Reads these values of `data`, all `[B, S]` and aligned with `input_ids`:

    - `advantages`;
    - `prev_logprobs` of the policy before training on the batch; if absent, the batch is on-policy, and the ratio is 1
      with the gradient of the log-probability;
    - `generation_logprobs` of the engine that sampled; if absent, no mismatch metrics and no importance correction.
      `kl_correction: generator` and the importance correction require them;
    - `reference_policy_logprobs`, if `kl_coef` > 0.

    And `sequence_weights [B]`, if present, the weights of rows in means over sequences: of episodes with several rows.
    """

    input_type = LossInput.LOGPROBS
    wants_entropy = True
    at_sampling_temperature = True

    def __init__(self, config: ClippedPGLossConfig) -> None:
        """Raises `ValueError` for level=constant without its length."""
        if config.level == "constant" and config.constant_length is None:
            raise ValueError("level=constant divides by constant_length; set it to a number of tokens")
        self.config = config
        self.entropy_gradient = bool(config.entropy_coef)
        self.loss_type = LossType.TOKEN_LEVEL if config.level == "token" else LossType.SEQUENCE_LEVEL

    @property
    def reads(self) -> dict[str, LossColumn]:
        """See `LossFunction`."""
        config, optional = self.config, LossColumn(required=False)
        columns = {"advantages": LossColumn(), "prev_logprobs": optional, "generation_logprobs": optional}
        columns[SEQUENCE_WEIGHTS] = LossColumn(per_token=False, required=False)
        if config.importance_correction != "none" or config.importance_mask != "none":
            columns["generation_logprobs"] = LossColumn()
        if config.kl_coef:
            columns["reference_policy_logprobs"] = LossColumn()
            if config.kl_correction == "generator":
                columns["generation_logprobs"] = LossColumn()
        return columns

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """See `LossFunction`."""
        config = self.config
        mask = loss_mask(data, next_token_logprobs.dtype)

        def tokens(values: Tensor) -> Tensor:
            return token_mean(values, mask, global_valid_toks)

        def mean(values: Tensor) -> Tensor:
            if config.level == "token":
                return tokens(values)
            weights = data.get(SEQUENCE_WEIGHTS)
            return sequence_mean(values, mask, global_valid_seqs, config.constant_length, weights)

        current = next_token_logprobs.detach()
        previous = data["prev_logprobs"][:, 1:] if "prev_logprobs" in data else current
        ratio = probability_ratio(config.ratio, next_token_logprobs, previous, mask)
        surrogate, clipped = SURROGATES[config.surrogate](ratio, next_token_logprobs, data["advantages"][:, 1:], config)
        metrics: dict[str, Any] = {
            "clip_fraction": tokens(clipped.float()),
            "ratio": tokens(ratio.detach()),
            "num_valid_samples": data["sample_mask"].sum(),
        }
        if "generation_logprobs" in data:
            difference = (previous - data["generation_logprobs"][:, 1:]) * mask
            metrics |= mismatch_metrics(difference, mask, global_valid_toks, config.mismatch_bound)
            weights, more = importance_weights(difference, mask, global_valid_toks, config)
            metrics |= more
            surrogate = surrogate if weights is None else surrogate * weights
        loss = policy_loss = mean(surrogate)
        metrics["policy_loss"] = policy_loss.detach()
        if config.kl_coef:
            reference = data["reference_policy_logprobs"][:, 1:]
            kl = kl_divergence(next_token_logprobs, reference, config.kl_estimator)
            metrics["kl"] = tokens(bounded_kl(kl.detach(), config.kl_max))
            if config.kl_correction != "none":
                sampled = data["generation_logprobs"][:, 1:] if config.kl_correction == "generator" else current
                kl = kl * kl_weight(config.kl_correction, next_token_logprobs, ratio, sampled)
            loss = policy_loss + config.kl_coef * mean(bounded_kl(kl, config.kl_max))
        if "entropy" in data:
            metrics["entropy"] = tokens(data["entropy"].detach())
            if config.entropy_coef:
                loss = loss - config.entropy_coef * mean(data["entropy"])
        return loss, metrics
