"""Losses on answers that are preferred or not: of pairs (DPO, IPO, SimPO, ORPO), and of single answers (KTO).

And of reward models: of pairs of scores (Bradley and Terry), and of the values at the ends of steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.loss import LossColumn, LossInput, LossType
from rlframework_preferences.config import KTOConfig, PairLossConfig, RewardModelTrainingConfig

REFERENCE = "reference_policy_logprobs"
_PER_ROW = LossColumn(per_token=False)


class PairLoss:
    """The loss of `PairLossConfig`, the mean over the pairs of the global batch.

    The two rows of a pair have the same `group_ids [B]` int64, which no other row has, and the same `sample_mask`, the
    pair's weight; their order and the rows between them do not matter. Also reads these values of `data`:

    - `chosen [B]`: 1 for chosen answers, 0 for rejected ones;
    - `reference_policy_logprobs [B, S]`, if the score is a log-ratio;
    - `chosen_tokens [B]`, if there is an SFT term with the mean over tokens: the number of tokens of all chosen answers
      of the global batch.

    Metrics are means over pairs. Equal scores count as half in `accuracy`. `chosen_reward` and `rejected_reward` are
    `beta` times the scores, and `margin` their difference.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInput.LOGPROBS
    wants_entropy = False
    at_sampling_temperature = True  # as the reference's log-probabilities
    needs_groups = True

    def __init__(self, config: PairLossConfig) -> None:
        self.config = config

    @property
    def reads(self) -> dict[str, LossColumn]:
        """See `LossFunction`."""
        columns = {"chosen": _PER_ROW}
        if self.config.score == "log_ratio":
            columns[REFERENCE] = LossColumn()
        if self.config.sft_weight and self.config.sft_mean == "token":
            columns["chosen_tokens"] = _PER_ROW
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
        scores = self.scores(next_token_logprobs, data)
        winners, losers, weights = find_pairs(data["group_ids"], data["chosen"], data["sample_mask"])
        pairs = global_valid_seqs.clamp(min=1.0) / 2

        def mean(values: Tensor) -> Tensor:
            return (values * weights).sum() / pairs

        difference = scores[winners] - scores[losers]
        loss = preference = mean(self._objective(difference - self.margins(data, winners)))
        loss = config.weight * loss
        rewards, gap = config.beta * scores.detach(), difference.detach()
        metrics = {
            "preference_loss": preference.detach(),
            "accuracy": mean((gap.sign() + 1) / 2),
            "margin": mean(config.beta * gap),
            "chosen_reward": mean(rewards[winners]),
            "rejected_reward": mean(rewards[losers]),
            "num_valid_samples": data["sample_mask"].sum(),
        }
        if config.sft_weight:
            nll = self._nll(next_token_logprobs, data, pairs)
            sft = (nll[winners] * weights).sum()
            metrics["sft_loss"] = sft.detach()
            loss = loss + config.sft_weight * sft
        return loss, metrics

    def scores(self, next_token_logprobs: Tensor, data: BatchedDataDict[Any]) -> Tensor:
        """Return the score of each answer, `[B]`."""
        values, mask = next_token_logprobs, answer_mask(data, next_token_logprobs.dtype)
        if self.config.score == "log_ratio":
            values = values - data[REFERENCE][:, 1:]
        scores = (values * mask).sum(1)
        if self.config.length_mean:
            scores = scores / mask.sum(1).clamp(min=1.0)
        if self.config.score == "log_odds":
            bounded = scores.clamp(max=-torch.finfo(scores.dtype).eps)  # a probability of 1 has no finite odds
            scores = bounded - torch.log(-torch.expm1(bounded))
        return scores

    def margins(self, data: BatchedDataDict[Any], winners: Tensor) -> Tensor | float:
        """Return what is subtracted from the differences of scores of the pairs with the chosen rows `winners`."""
        return 0.0

    def _objective(self, difference: Tensor) -> Tensor:
        config, smoothing = self.config, self.config.label_smoothing
        if config.objective == "squared":
            return (difference - 0.5 / config.beta).square()
        scaled = config.beta * difference - config.margin
        if not smoothing:
            return -logsigmoid(scaled)
        right, wrong = -(1.0 - smoothing) * logsigmoid(scaled), -smoothing * logsigmoid(-scaled)
        return right + wrong if config.smoothing == "conservative" else (right - wrong) / (1.0 - 2.0 * smoothing)

    def _nll(self, next_token_logprobs: Tensor, data: BatchedDataDict[Any], pairs: Tensor) -> Tensor:
        """The term of each row in the SFT loss, `[B]`, if its answer is chosen."""
        mask = answer_mask(data, next_token_logprobs.dtype)
        total = -(next_token_logprobs * mask).sum(1)
        if self.config.sft_mean == "token":
            tokens: Tensor = data["chosen_tokens"]
            return total / tokens.clamp(min=1.0)
        return (total if self.config.sft_mean == "sum" else total / mask.sum(1).clamp(min=1.0)) / pairs


class KTOLoss:
    """The loss of `KTOConfig`, the mean over the valid rows of the global batch.

    With the log-ratio r of an answer and the estimate z of the KL divergence, a row costs
    w (1 - sigmoid(beta (r - z))) if its answer is chosen and w (1 - sigmoid(beta (z - r))) if not, where w is the
    weight of its kind (arXiv:2402.01306, eq. 7 and 8). Reads these values of `data`:

    - `chosen [B]`: 1 for desirable answers, 0 for others;
    - `kl_estimate [B]`: z, the same number in each row;
    - `reference_policy_logprobs [B, S]`.

    The means of rewards and of the margin are those of batches with as many chosen as rejected answers.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInput.LOGPROBS
    wants_entropy = False
    at_sampling_temperature = True  # as the reference's log-probabilities

    def __init__(self, config: KTOConfig) -> None:
        self.config = config

    @property
    def reads(self) -> dict[str, LossColumn]:
        """See `LossFunction`."""
        return {"chosen": _PER_ROW, "kl_estimate": _PER_ROW, REFERENCE: LossColumn()}

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """See `LossFunction`."""
        config, mask, share = self.config, data["sample_mask"], data["chosen"]
        ratios, chosen = self.scores(next_token_logprobs, data), share > 0
        rows = global_valid_seqs.clamp(min=1.0)
        gain = torch.where(chosen, ratios - data["kl_estimate"], data["kl_estimate"] - ratios)
        weights = mask * (config.desirable_weight * share + config.undesirable_weight * (1 - share))
        loss = (weights * torch.sigmoid(-config.beta * gain)).sum() / rows
        rewards = 2.0 * config.beta * ratios.detach() * mask / rows  # half of the rows are of each kind
        wins, losses = (rewards * chosen).sum(), (rewards * ~chosen).sum()
        metrics = {
            "chosen_reward": wins,
            "rejected_reward": losses,
            "margin": wins - losses,
            "kl_estimate": (data["kl_estimate"] * mask).sum() / rows,
            "num_valid_samples": mask.sum(),
        }
        return loss, metrics

    def scores(self, next_token_logprobs: Tensor, data: BatchedDataDict[Any]) -> Tensor:
        """Return the log-ratio of each answer to the reference, `[B]`."""
        reference: Tensor = data[REFERENCE][:, 1:]
        return ((next_token_logprobs - reference) * answer_mask(data, next_token_logprobs.dtype)).sum(1)


def answer_mask(data: BatchedDataDict[Any], dtype: torch.dtype) -> Tensor:
    """Return `[B, S-1]`, in the layout of `next_token_logprobs`: 1 for tokens of answers, whatever the row weighs."""
    mask: Tensor = data["token_mask"][:, 1:]
    return mask.to(dtype)


def find_pairs(group_ids: Tensor, chosen: Tensor, sample_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of chosen and of rejected answers, `[B-1]` each, and the weights of these pairs, `[B-1]`.

    Two rows are a pair if they have the same group id, and one of them is chosen; its weight is the smaller of their
    `sample_mask`. Entries that are no pair have weight 0, so that no shape depends on values: reading them would wait
    for the device.
    """
    order = torch.argsort(group_ids, stable=True)
    first, second = order[:-1], order[1:]
    is_pair = (group_ids[first] == group_ids[second]) & (chosen[first] != chosen[second])
    ahead = chosen[first] > chosen[second]
    weights = torch.where(is_pair, torch.minimum(sample_mask[first], sample_mask[second]), 0.0)
    return torch.where(ahead, first, second), torch.where(ahead, second, first), weights


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
