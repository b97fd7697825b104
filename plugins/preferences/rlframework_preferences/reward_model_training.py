"""Training reward models: a score per row from preference pairs, and a value per step from labelled steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rlframework.algorithms.intervals import wilson
from rlframework.algorithms.loop import StepResult
from rlframework.base.errors import DataError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.sections import AlgorithmConfig, RunConfig
from rlframework.datasets.chat.rendering import Rendered, render_steps
from rlframework.datasets.tokens import pad_rows
from rlframework.interfaces.environment import Sample
from rlframework_preferences.config import ProcessRewardModelTrainingConfig, RewardModelTrainingConfig
from rlframework_preferences.preference_losses import BradleyTerryLoss, StepLoss
from rlframework_preferences.preference_training import PreferenceTraining

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.datasets.image_inputs import ImageInputs


class RewardModelTraining(PreferenceTraining):
    """Train a model with a head of scores (`policy.head=score`) on one global batch of pairs per step.

    The samples are those of `PreferenceTraining`; with `margin_coef` they have a number in `metadata["margin"]`.
    """

    config_model: ClassVar[type[AlgorithmConfig]] = RewardModelTrainingConfig
    config: RewardModelTrainingConfig

    @classmethod
    def head(cls, config: Any) -> str:
        """See `Algorithm.head`."""
        return "score"

    def make_loss(self) -> BradleyTerryLoss:
        """See `PreferenceTraining.make_loss`."""
        return BradleyTerryLoss(self.config)

    def outputs(self, batch: BatchedDataDict[Any]) -> Tensor:
        """Return the scores of `batch`, `[B]`."""
        scores: Tensor = self.parts.policy.score(batch)["scores"]
        return scores

    def encode(self, samples: Sequence[Sample]) -> BatchedDataDict[Any]:
        """See `PreferenceTraining.encode`; also `margin [B]`, equal in both rows of a pair, if the loss reads it."""
        batch = super().encode(samples)
        if self.config.margin_coef:
            batch["margin"] = torch.tensor([_margin(sample) for sample in samples]).repeat_interleave(2)
        return batch


class ProcessRewardModelTraining(PreferenceTraining):
    """Train a model with a head of values (`policy.head=value`) on one global batch of answers per step.

    The samples have the steps of an answer in `metadata["steps"]`, and their labels in `metadata["labels"]`.
    """

    config_model: ClassVar[type[AlgorithmConfig]] = ProcessRewardModelTrainingConfig
    config: ProcessRewardModelTrainingConfig

    @classmethod
    def head(cls, config: Any) -> str:
        """See `Algorithm.head`."""
        return "value"

    @classmethod
    def samples_per_step(cls, config: RunConfig) -> int:
        """Return the rows of a global batch, one per answer."""
        return config.policy.train_global_batch_size

    @classmethod
    def shown_rows(
        cls,
        config: RunConfig,
        samples: Sequence[Sample],
        tokenizer: PreTrainedTokenizerBase,
        images: ImageInputs | None,
    ) -> list[tuple[str, Rendered]]:
        """Raise a `ConfigError`: the ends of steps are not shown."""
        return super(PreferenceTraining, cls).shown_rows(config, samples, tokenizer, images)

    def make_loss(self) -> StepLoss:
        """See `PreferenceTraining.make_loss`."""
        return StepLoss()

    def outputs(self, batch: BatchedDataDict[Any]) -> Tensor:
        """Return the values of `batch`, `[B, S-1]`."""
        values: Tensor = self.parts.policy.get_values(batch, positions="loss")["values"]
        return values[:, 1:]

    def validate(self, step: int) -> StepResult:
        """Return the loss on held-out answers, and the shares of steps and of answers that are judged right.

        An answer is if all of its steps are; one whose steps are all truncated does not count. `accuracy_low`,
        `accuracy_high`: Wilson's 95 % interval for answers.
        """
        batch, policy = self.held_out, self.parts.policy
        policy.prepare_for_lp_inference()
        values, steps = self.outputs(batch), batch["token_mask"][:, 1:]
        loss, metrics = self.loss(values, batch, batch["sample_mask"].sum(), steps.sum())
        judged, wrong = (steps > 0).any(1), (~self.loss.is_right(values, batch) & (steps > 0)).any(1)
        right, answers = int((judged & ~wrong).sum()), int(judged.sum())
        low, high = wilson(right, answers)
        found = {"loss": float(loss), "accuracy": right / answers, "accuracy_low": low, "accuracy_high": high}
        found |= {"step_accuracy": float(metrics["accuracy"]), "samples": float(answers)}
        return {f"validation/{name}": value for name, value in found.items()}, []

    def encode(self, samples: Sequence[Sample]) -> BatchedDataDict[Any]:
        """Return the batch of `samples`: `token_mask [B, S]` is 1 at the token after each step, `step_labels [B, S]`
        its label there.
        """
        tokenizer: Any = self.parts.tokenizer
        rows = [render_steps(tokenizer, sample, _steps(sample, self.config.separator)) for sample in samples]
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        input_ids, lengths = pad_rows([ids[: self.config.max_tokens] for ids, _ in rows], pad)
        labels, mask = (torch.zeros(input_ids.shape) for _ in range(2))
        for row, ((_, ends), sample) in enumerate(zip(rows, samples, strict=True)):
            kept = torch.tensor([end for end in ends if end < lengths[row]], dtype=torch.int64)
            mask[row, kept] = 1.0
            labels[row, kept] = torch.tensor(sample.metadata["labels"][: len(kept)], dtype=torch.float32)
        masks = {"token_mask": mask, "sample_mask": torch.ones(len(rows)), "step_labels": labels}
        return BatchedDataDict({"input_ids": input_ids, "input_lengths": lengths, **masks})

    def longest_rows(self, samples: Sequence[Sample]) -> list[Rendered]:
        """Return the rows of `samples` as ids and mask."""
        batch = self.encode(samples)
        ids, mask = batch["input_ids"].tolist(), batch["token_mask"].bool().tolist()
        return [(ids[row][:end], mask[row][:end]) for row, end in enumerate(batch["input_lengths"].tolist())]


def _margin(sample: Sample) -> float:
    margin = sample.metadata.get("margin")
    if not isinstance(margin, (int, float)):
        raise DataError(
            f"sample {sample.id!r} has no margin, which algorithm.margin_coef needs: give its row score_chosen and "
            "score_rejected, or margin; or set margin_coef to 0"
        )
    return float(margin)


def _steps(sample: Sample, separator: str) -> list[str]:
    steps, labels = sample.metadata.get("steps"), sample.metadata.get("labels")
    if not (isinstance(steps, (list, tuple)) and isinstance(labels, (list, tuple)) and 0 < len(steps) == len(labels)):
        raise DataError(
            f"sample {sample.id!r} has no labelled steps: it needs metadata['steps'], a list of texts, and as many "
            "metadata['labels'], as the environment `preferences` has for rows with the columns prompt, completions "
            "and labels"
        )
    return [step + separator for step in steps]
