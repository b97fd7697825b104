"""The clipped policy-gradient loss of PPO and GRPO, with its common options.

Ratio clipping with separate bounds (DAPO, arXiv:2503.14476), dual clip (arXiv:1912.09729), means over tokens or
sequences, a KL penalty to a reference policy, and truncated importance weights that correct for the difference between
trainer and generator (https://fengyao.notion.site/off-policy-rl).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rlframework.algorithms.losses.mismatch import mismatch_metrics
from rlframework.algorithms.losses.nll import loss_mask, token_mean
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.interfaces.loss import LossColumn, LossInput, LossType

SEQUENCE_WEIGHTS = "sequence_weights"
"""The column of the weights of rows in means over sequences."""


class ClippedPGLoss:
    """-min(ratio * A, clip(ratio) * A), averaged by global counts, plus `kl_coef` times the KL to the reference.

    Reads these values of `data`, all `[B, S]` and aligned with `input_ids`:

    - `advantages`;
    - `prev_logprobs` of the policy before training on the batch; if absent, the batch is on-policy, and the ratio is 1
      with the gradient of the log-probability;
    - `generation_logprobs` of the engine that sampled; if absent, no mismatch metrics and no importance correction.
      `kl_correction: generator` requires them;
    - `reference_policy_logprobs`, if `kl_coef` > 0.

    And `sequence_weights [B]`, if present, the weights of rows in means over sequences: of episodes with several rows.
    """

    input_type = LossInput.LOGPROBS
    wants_entropy = True
    at_sampling_temperature = True

    def __init__(self, config: ClippedPGLossConfig) -> None:
        self.config = config
        self.loss_type = LossType.TOKEN_LEVEL if config.level == "token" else LossType.SEQUENCE_LEVEL

    @property
    def reads(self) -> dict[str, LossColumn]:
        """See `LossFunction`."""
        config, optional = self.config, LossColumn(required=False)
        columns = {"advantages": LossColumn(), "prev_logprobs": optional, "generation_logprobs": optional}
        columns[SEQUENCE_WEIGHTS] = LossColumn(per_token=False, required=False)
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
        ratio = (next_token_logprobs - previous).exp()
        surrogate, clipped = self._surrogate(ratio, data["advantages"][:, 1:])
        metrics: dict[str, Any] = {
            "clip_fraction": tokens(clipped.float()),
            "ratio": tokens(ratio.detach()),
            "num_valid_samples": data["sample_mask"].sum(),
        }
        if "generation_logprobs" in data:
            difference = (previous - data["generation_logprobs"][:, 1:]) * mask
            metrics |= mismatch_metrics(difference, mask, global_valid_toks, config.mismatch_bound)
            if config.importance_correction == "truncated":
                weights = difference.exp()
                metrics["importance_weight"] = tokens(weights)
                metrics["importance_truncated_fraction"] = tokens((weights > config.importance_cap).float())
                surrogate = surrogate * weights.clamp(max=config.importance_cap)
        loss = policy_loss = mean(surrogate)
        metrics["policy_loss"] = policy_loss.detach()
        if config.kl_coef:
            reference = data["reference_policy_logprobs"][:, 1:]
            kl = kl_divergence(next_token_logprobs, reference, config.kl_estimator, config.kl_max)
            metrics["kl"] = tokens(kl.detach())
            if config.kl_correction == "ratio":
                kl = kl * ratio
            elif config.kl_correction == "generator":
                kl = kl * ((current - data["generation_logprobs"][:, 1:]) * mask).exp()
            loss = policy_loss + config.kl_coef * mean(kl)
        if "entropy" in data:
            metrics["entropy"] = tokens(data["entropy"])
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


def sequence_mean(
    values: Tensor, mask: Tensor, global_valid_seqs: Tensor, length: int | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return this microbatch's term of the mean, over all valid sequences of the global batch, of their token means.

    `values` and `mask` are `[B, S-1]`; the mean of a sequence is over its valid tokens, or its sum divided by `length`,
    times its `weights [B]`.
    """
    means = (values * mask).sum(1) / (mask.sum(1).clamp(min=1.0) if length is None else length)
    if weights is not None:
        means = means * weights
    return means.sum() / global_valid_seqs.clamp(min=1.0)


def kl_divergence(
    logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"], maximum: float | None = None
) -> Tensor:
    """Estimate KL(policy || reference) from log-probabilities of sampled tokens, elementwise.

    With r = reference - policy: k1 = -r, k2 = r^2 / 2, k3 = exp(r) - r - 1 (http://joschu.net/blog/kl-approx.html).
    k1 and k3 are unbiased; k2 and k3 have low variance. As a loss term, the expected gradient of k2 is that of the
    divergence, that of k3 is close to it, and that of k1 is zero: use k1 for reward shaping and metrics. Estimates are
    clamped to `-maximum ... maximum`, if given.
    """
    ratio = reference_logprobs - logprobs
    if estimator == "k1":
        divergence = -ratio
    elif estimator == "k2":
        divergence = 0.5 * ratio.square()
    else:
        # an infinite exponential would make the gradient of the clamp NaN; at 80 any `maximum` is exceeded already
        bounded = ratio if maximum is None else ratio.clamp(max=80.0)
        divergence = torch.expm1(bounded) - bounded
    return divergence if maximum is None else divergence.clamp(-maximum, maximum)
