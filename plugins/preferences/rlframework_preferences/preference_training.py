"""Training on preference pairs: DPO, IPO, SimPO, ORPO and KTO, which differ in their losses alone.

A global batch has two rows per pair, the chosen answer before the rejected one. Its log-probabilities under the
reference policy are computed once, before the step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.algorithms.intervals import wilson
from rlframework.algorithms.loop import StepLoop, StepResult, Timer, training_metrics
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.sections import RunConfig
from rlframework.datasets.chat.rendering import Rendered
from rlframework.datasets.loader import PromptLoader
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.messages import pictures_of
from rlframework.rollout.parts import Parts
from rlframework_preferences.config import KTOConfig, PairwiseConfig, PreferenceConfig
from rlframework_preferences.pairs import PreferencePairs, media_of_pairs, mismatched_rows, pair_of
from rlframework_preferences.preference_losses import REFERENCE, KTOLoss, PairLoss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.datasets.image_inputs import ImageInputs

_LOG = logging.getLogger(__name__)


class PreferenceTraining(StepLoop):
    """Train on one global batch of pairs per step.

    The samples of the environment have the rejected answer in `metadata["rejected"]`, and the chosen one as completion.
    """

    config: PreferenceConfig

    @classmethod
    def needs_reference_model(cls, config: PreferenceConfig) -> bool:
        """Whether the loss compares with the reference policy."""
        return config.uses_reference

    @classmethod
    def samples_per_step(cls, config: RunConfig) -> int:
        """Return the pairs of a global batch, which has two rows each."""
        return config.policy.train_global_batch_size // 2

    @classmethod
    def shown_rows(
        cls,
        config: RunConfig,
        samples: Sequence[Sample],
        tokenizer: PreTrainedTokenizerBase,
        images: ImageInputs | None,
    ) -> list[tuple[str, Rendered]]:
        """Return two rows for each pair, as they are trained on."""
        assert isinstance(config.algorithm, PreferenceConfig)
        pairs = PreferencePairs.from_rows([pair_of(sample) for sample in samples], tokenizer, images=images)
        fields = pairs.to_fields()
        ends = fields["input_lengths"].clamp(max=config.algorithm.max_tokens or fields["input_ids"].shape[1]).tolist()
        names = [f"{sample.id} {side}" for sample in samples for side in ("chosen", "rejected")]
        rows = zip(names, fields["input_ids"].tolist(), fields["token_mask"].bool().tolist(), ends, strict=True)
        return [(name, (ids[:end], mask[:end])) for name, ids, mask, end in rows]

    loader: PromptLoader[Any]

    def __init__(self, parts: Parts) -> None:
        self._alike: dict[str, None] = {}  # the ids of checked samples whose two rows are equal
        super().__init__(parts)
        self._scored_syncs = -1
        """The updates of the reference that `held_out` has been scored after; -1: it has not."""
        self.inputs.rows("train", self.train_samples, self.longest_rows)
        self._warn_of_equal_rows()
        self.loader = PromptLoader(self.train_samples, self.samples_per_step(parts.config), parts.config.seed)
        self.loss = self.make_loss()

    def make_loss(self) -> Any:
        """Return the loss."""
        assert isinstance(self.config, KTOConfig | PairwiseConfig)
        return KTOLoss(self.config) if isinstance(self.config, KTOConfig) else PairLoss(self.config.pair_loss())

    def outputs(self, batch: BatchedDataDict[Any]) -> Tensor:
        """Return the first argument of the loss for `batch`."""
        logprobs: Tensor = self.parts.policy.get_logprobs(batch, positions="loss")["logprobs"]
        return logprobs[:, 1:]

    def train_step(self, step: int, timer: Timer) -> StepResult:
        """See `StepLoop.train_step`."""
        with timer.phase("data"):
            batch = self.encode(next(self.loader))
        with timer.phase("logprobs"):
            self._add_scores(batch)
        with timer.phase("train"):
            self.parts.policy.prepare_for_training()
            result = self.train(step, batch, self.loss)
        metrics = self.with_loss_metrics(training_metrics([result]), result["metrics"])
        metrics["train/tokens"] = float(batch["input_lengths"].sum())
        return metrics, []

    def check_validation(self, samples: Sequence[Sample]) -> None:
        """See `StepLoop.check_validation`."""
        self.inputs.rows("validation", samples, self.longest_rows)

    def validate(self, step: int) -> StepResult:
        """Return the loss on the held-out pairs, and the share of them whose chosen answer has the higher score.

        Equal scores count as half. `accuracy_low` and `accuracy_high`: Wilson's 95 % interval, for independent pairs.
        """
        batch, policy = self.held_out, self.parts.policy
        if self._scored_syncs != self.reference_sync.count:
            self._add_reference(batch)
            self._scored_syncs = self.reference_sync.count
        policy.prepare_for_lp_inference()
        if isinstance(self.loss, KTOLoss):
            batch = BatchedDataDict({**batch, "kl_estimate": self._kl_estimate(batch)})
        outputs = self.outputs(batch)
        tokens = (batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]).sum()
        loss, metrics = self.loss(outputs, batch, batch["sample_mask"].sum(), tokens)
        scores = self.loss.scores(outputs, batch).double().unflatten(0, (-1, 2))
        right, pairs = float(((scores[:, 0] - scores[:, 1]).sign() + 1).sum() / 2), len(scores)
        low, high = wilson(right, pairs)
        found = {"loss": float(loss), "accuracy": right / pairs, "accuracy_low": low, "accuracy_high": high}
        found |= {name: float(metrics[name]) for name in ("margin", "chosen_reward", "rejected_reward")}
        return {f"validation/{name}": value for name, value in (found | {"samples": float(pairs)}).items()}, []

    def encode(self, samples: Sequence[Sample]) -> BatchedDataDict[Any]:
        """Return the batch of `samples`: rows of `PreferencePairs`, and `chosen_tokens [B]`, their total.

        With the media of their images, which both rows of a pair share.
        """
        rows, images = [pair_of(sample) for sample in samples], self.parts.images
        fields = PreferencePairs.from_rows(rows, self.parts.tokenizer, images=images).to_fields()
        width = self.config.max_tokens or fields["input_ids"].shape[1]
        data = {name: fields[name][:, :width] for name in ("input_ids", "token_mask")}
        data |= {name: fields[name].clamp(max=width) for name in ("input_lengths", "prompt_lengths")}
        counts = data["token_mask"][:, 1:].sum(1)
        data |= {name: fields[name] for name in ("sample_mask", "group_ids", "chosen")}
        media = {} if images is None else media_of_pairs(rows, data["input_ids"], images)
        if images is not None and width < fields["input_ids"].shape[1]:  # images may be cut off
            for ids, row in zip(data["input_ids"][0::2].tolist(), rows, strict=True):
                images.check(ids, pictures_of(row.messages))
        return BatchedDataDict(data | {"chosen_tokens": counts[0::2].sum().expand(len(counts)).clone()} | media)

    @cached_property
    def held_out(self) -> BatchedDataDict[Any]:
        """The validation pairs; `validate` adds the reference's log-probabilities, again when it has been updated."""
        return self.encode(self.parts.environment.samples("validation")[: self.config.validation.samples])

    def _add_scores(self, batch: BatchedDataDict[Any]) -> None:
        """Add what the loss reads of other policies: log-probabilities of the reference, and KTO's estimate."""
        self._add_reference(batch)
        if isinstance(self.loss, KTOLoss):
            batch["kl_estimate"] = self._kl_estimate(batch)

    def _add_reference(self, batch: BatchedDataDict[Any]) -> None:
        if self.config.uses_reference:
            self.parts.policy.prepare_for_lp_inference()
            scored = self.parts.policy.get_reference_policy_logprobs(batch, positions="loss")
            batch[REFERENCE] = scored["reference_logprobs"]

    def _kl_estimate(self, batch: BatchedDataDict[Any]) -> Tensor:
        """Estimate KL(policy || reference) from answers to other prompts of the batch; the same number per row, [B].

        max(0, mean of log-ratios), as in arXiv:2402.01306, section 4.1.
        """
        rows, policy = mismatched_rows(batch, self.parts.tokenizer.pad_token_id), self.parts.policy
        ratios: Tensor = policy.get_logprobs(rows, positions="loss")["logprobs"]
        ratios = ratios - policy.get_reference_policy_logprobs(rows, positions="loss")["reference_logprobs"]
        mean: Tensor = (ratios * rows["token_mask"]).sum(1).mean().clamp(min=0.0)
        return mean.expand(batch.size).clone()

    def longest_rows(self, samples: Sequence[Sample]) -> list[Rendered]:
        """The longer row of each pair, as ids and mask. Notes the samples whose two rows are equal."""
        batch = self.encode(samples)
        lengths = batch["input_lengths"].view(-1, 2)
        equal = (batch["input_ids"][0::2] == batch["input_ids"][1::2]).all(1) & (lengths[:, 0] == lengths[:, 1])
        self._alike |= dict.fromkeys(samples[pair].id for pair in equal.nonzero()[:, 0].tolist())
        longer = (2 * torch.arange(len(samples)) + lengths.argmax(1)).tolist()
        ids, mask = batch["input_ids"].tolist(), batch["token_mask"].bool().tolist()
        return [(ids[row][:end], mask[row][:end]) for row, end in zip(longer, lengths.amax(1).tolist(), strict=True)]

    def _warn_of_equal_rows(self) -> None:
        """Log how many of the checked pairs have two equal rows: equal answers, or different ones that are cut off."""
        if self._alike:
            cut = self.config.max_tokens
            _LOG.warning(
                "%s of the checked pairs have the same tokens in both rows%s, which teach nothing; the first: "
                "sample %r. Remove them",
                f"{len(self._alike):,}",
                "" if cut is None else f", after truncation to algorithm.max_tokens={cut}",
                next(iter(self._alike)),
            )
