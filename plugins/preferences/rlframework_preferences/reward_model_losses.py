"""Losses of reward models: of pairs of scores (Bradley and Terry), and of the values at the ends of steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.loss import LossColumn, LossInput, LossType
from rlframework_preferences.config import RewardModelTrainingConfig
from rlframework_preferences.preference_losses import PairLoss, find_pairs


class BradleyTerryLoss(PairLoss):
    """The loss of `RewardModelTrainingConfig`, the mean over the pairs of the global batch.

    With the scores s of the chosen (w) and the rejected (l) answer and the margin m of the pair, a pair costs
    -log sigmoid(s_w - s_l - margin_coef m) + centering_coef (s_w + s_l)^2, the first term with label smoothing as in
    `PairLoss`, which also says how pairs are found. Reads `margin [B]`, equal in both rows, if it has a weight.

    Metrics are those of `PairLoss`, of scores without margins, and `centering_loss`.
    """

    input_type = LossInput.SCORES
    at_sampling_temperature = False

    def __init__(self, config: RewardModelTrainingConfig) -> None:
        super().__init__(config.pair_loss())
        self._margin_coef, self._centering_coef = config.margin_coef, config.centering_coef

    @property
    def reads(self) -> dict[str, LossColumn]:
        """See `LossFunction`."""
        names = ("chosen", "margin") if self._margin_coef else ("chosen",)
        return {name: LossColumn(per_token=False) for name in names}

    def __call__(
        self, scores: Tensor, data: BatchedDataDict[Any], global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """See `LossFunction`; `scores [B]`."""
        loss, metrics = super().__call__(scores, data, global_valid_seqs, global_valid_toks)
        if self._centering_coef:
            winners, losers, weights = find_pairs(data["group_ids"], data["chosen"], data["sample_mask"])
            sums = (scores[winners] + scores[losers]).square() * weights
            centering = sums.sum() / (global_valid_seqs.clamp(min=1.0) / 2)
            metrics["centering_loss"] = centering.detach()
            loss = loss + self._centering_coef * centering
        return loss, metrics

    def scores(self, scores: Tensor, data: BatchedDataDict[Any]) -> Tensor:
        """Return the score of each answer, `[B]`: what the loss is given."""
        return scores

    def margins(self, data: BatchedDataDict[Any], winners: Tensor) -> Tensor | float:
        """See `PairLoss.margins`."""
        return self._margin_coef * data["margin"][winners] if self._margin_coef else 0.0


class StepLoss:
    """The binary cross-entropy of steps, the mean over all steps of the global batch.

    With the value v at the end of a step and its label y from 0 to 1, a step costs
    -(y log sigmoid(v) + (1 - y) log(1 - sigmoid(v))). `token_mask` is 1 at the token after each step, whose entry of
    `values` is that after the step, and `step_labels [B, S]` has y there.

    Metrics: `accuracy`, the fraction of steps with v > 0 where y > 0.5, else v <= 0; `label`, the mean of y.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInput.VALUES
    wants_entropy = False
    at_sampling_temperature = False
    reads = {"step_labels": LossColumn()}  # noqa: RUF012 - a mapping that nothing changes, as `LossFunction` has it

    def __call__(
        self, values: Tensor, data: BatchedDataDict[Any], global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """See `LossFunction`; `values [B, S-1]`."""
        labels = data["step_labels"][:, 1:].to(values.dtype)
        weights = data["token_mask"][:, 1:] * data["sample_mask"][:, None] / global_valid_toks.clamp(min=1.0)
        loss = (binary_cross_entropy_with_logits(values, labels, reduction="none") * weights).sum()
        metrics = {
            "accuracy": (self.is_right(values, data) * weights).sum(),
            "label": (labels * weights).sum(),
            "num_valid_samples": data["sample_mask"].sum(),
        }
        return loss, metrics

    @staticmethod
    def is_right(values: Tensor, data: BatchedDataDict[Any]) -> Tensor:
        """Return `[B, S-1]` bool: where the sign of a value agrees with the label."""
        right: Tensor = (values.detach() > 0) == (data["step_labels"][:, 1:] > 0.5)
        return right
