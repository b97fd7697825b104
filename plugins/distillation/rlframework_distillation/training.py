"""Distillation of a teacher into the policy, on the policy's completions or on those of the data (arXiv:2306.13649)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import floor
from typing import Any, ClassVar

import numpy as np
import torch

from rlframework.algorithms.loop import StepLoop, StepResult, Timer, training_metrics
from rlframework.algorithms.losses import ClippedPGLoss
from rlframework.algorithms.sft import open_token_data
from rlframework.base.errors import ConfigError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import SFTConfig
from rlframework.config.sections import AlgorithmConfig, RunConfig
from rlframework.datasets.chat.rendering import Rendered, has_answer, render_samples
from rlframework.datasets.loader import PromptLoader
from rlframework.datasets.tokens import pad_rendered
from rlframework.interfaces.environment import Environment, Sample
from rlframework.interfaces.loss import LossFunction
from rlframework.rollout.optimizer_steps import optimizer_steps
from rlframework.rollout.parts import Parts
from rlframework.rollout.seeds import row_seeds
from rlframework.rollout.step_rollouts import rollout
from rlframework_distillation.config import DistillationConfig
from rlframework_distillation.loss import DistillationLoss
from rlframework_distillation.teacher_data import TeacherData
from rlframework_distillation.teacher_targets import Rows, add_sft_weights, add_targets, open_teacher


class Distillation(StepLoop):
    """Train on one global batch per step: of rollouts, of completions of the data, or of both."""

    config_model: ClassVar[type[AlgorithmConfig]] = DistillationConfig
    config: DistillationConfig

    @classmethod
    def further_policies(cls, config: RunConfig) -> Mapping[str, int]:
        """Return the teacher, unless it is behind an endpoint or its log-probabilities are stored."""
        assert isinstance(config.algorithm, DistillationConfig)
        return {"teacher": 0} if config.algorithm.uses_teacher_section else {}

    @classmethod
    def training_samples(cls, config: RunConfig, environment: Environment) -> int:
        """Return the number of rows of the teacher data, if there is any, or else of the environment's samples."""
        assert isinstance(config.algorithm, DistillationConfig)
        data = config.algorithm.teacher_data
        return super().training_samples(config, environment) if data is None else len(TeacherData(data))

    loader: PromptLoader[Any]

    def __init__(self, parts: Parts) -> None:
        config = parts.config.algorithm
        assert isinstance(config, DistillationConfig)
        self.teacher = open_teacher(parts, config)
        super().__init__(parts)
        self.batch_size = parts.config.policy.train_global_batch_size
        self.stored = open_teacher_data(config, parts) if config.teacher_data is not None else None
        rows: Sequence[Any] = self.train_samples if self.stored is None else range(len(self.stored))
        mixture = getattr(self.train_samples, "mixture", ())  # stored rows are those of the samples, in order
        self.loader = PromptLoader(rows, self.batch_size, parts.config.seed, mixture)
        if self.stored is not None:
            self.inputs.tokens(self.stored.tokens.lengths, str(self.stored.path))
        elif config.student_fraction < 1.0:
            self.inputs.rows("train", self.train_samples, self.render)
        if config.student_fraction:
            self.inputs.rollouts(self.train_samples, scored=True)
        self.measure = DistillationLoss(config.loss.model_copy(update={"sft_weight": 0.0}))
        sampled = config.tokens == "sampled"
        self.loss: LossFunction = ClippedPGLoss(config.policy_gradient) if sampled else DistillationLoss(config.loss)

    def train_step(self, step: int, timer: Timer) -> StepResult:
        """See `StepLoop.train_step`."""
        parts, samples = self.parts, next(self.loader)
        generated = student_rows(self.config, self.batch_size, parts.config.seed, step)
        metrics, batches, records, episode_of = {"train/student_rows": float(generated)}, [], [], torch.arange(0)
        rollout_metrics: dict[str, float] = {}
        if generated:
            parts.generation.prepare_for_generation()  # before the timer: a refit does not count as generation
            with timer.phase("generate"):
                result = rollout(parts, samples[:generated], row_seeds(parts.config.seed, step, generated))
            batches, episode_of = [result.data], result.episode_of
            rollout_metrics = {f"train/{name}": value for name, value in result.metrics.items()}
            records = result.records(step, "train", parts.config.observers.samples, parts.tokenizer)
        if generated < self.batch_size:
            with timer.phase("data"):
                batches.append(self.encode(samples[generated:]))
            keys = batches[-1].keys()
            batches = [BatchedDataDict({key: batch[key] for key in keys}) for batch in batches]
            episode_of = torch.cat((episode_of, torch.arange(generated, self.batch_size)))
        of_data, ranks = episode_of >= generated, parts.policy.data_parallel_size
        data: Rows = BatchedDataDict.from_batches([*batches])
        if self.config.loss.sft_weight:
            add_sft_weights(data, of_data)
        data, rows = optimizer_steps(data, episode_of, episodes=self.batch_size, ranks=ranks, level="token")
        with timer.phase("teacher"):
            metrics |= self.add_targets(data, sampled=self.config.tokens == "sampled")
        with timer.phase("train"):
            parts.policy.prepare_for_training()
            trained = self.train(step, data, self.loss, rows)
        metrics |= self.with_loss_metrics(training_metrics([trained]), trained["metrics"], taken=rollout_metrics)
        return metrics | rollout_metrics | {"train/tokens": float(data["input_lengths"].sum())}, records

    def check_validation(self, samples: Sequence[Sample]) -> None:
        """Check the prompts if the environment scores answers, and the completions if the samples have them."""
        self.has_answers = self.teacher is not None and all(map(has_answer, samples))
        if self.parts.environment.scores or not self.has_answers:
            super().check_validation(samples)
        if self.has_answers:
            self.inputs.rows("validation", samples, self.render)

    def validate(self, step: int) -> StepResult:
        """Score greedy answers, if the environment can, and compute the divergence on the held-out completions."""
        metrics, records = super().validate(step) if self.parts.environment.scores else ({}, [])
        if self.has_answers:
            data = self._held_out
            if self.config.tokens == "student_top_k":  # which change with the student
                self.add_targets(data, sampled=False)
            result = self.parts.policy.train(data, self.measure, eval_mode=True, gbs=data.size)
            metrics["validation/divergence"] = result["loss"]
        return metrics, records

    @cached_property
    def _held_out(self) -> Rows:
        """The held-out completions with the teacher's most likely tokens; repeated up to a multiple of the ranks."""
        samples = self.parts.environment.samples("validation")[: self.config.validation.samples]
        batch, count = self.encode(samples), len(samples)
        rows = torch.arange(count + -count % self.parts.policy.data_parallel_size)
        batch = batch.select_indices(rows % count)
        batch["sample_mask"] = (rows < count).float()
        self.add_targets(batch, sampled=False)
        return batch

    def add_targets(self, data: Rows, *, sampled: bool) -> dict[str, float]:
        """Add to `data` what the loss reads of the teacher, unless it is stored with the rows; return metrics."""
        if self.teacher is None:
            return {}
        return add_targets(data, self.parts.policy, self.teacher, self.config, sampled=sampled)

    def encode(self, samples: Sequence[Any]) -> Rows:
        """Return the batch of `samples`, or of the stored rows with these numbers."""
        if self.stored is not None:
            return self.stored.batch(samples, self.parts.tokenizer.pad_token_id)
        rows = pad_rendered(self.render(samples), self.parts.tokenizer.pad_token_id)
        return BatchedDataDict({**rows._asdict(), "sample_mask": torch.ones(len(samples))})

    def render(self, samples: Sequence[Sample]) -> list[Rendered]:
        """Return the token ids and mask of each sample, as configured."""
        return render_samples(self.parts.tokenizer, samples, self.config.train_on, self.config.max_tokens)


def open_teacher_data(config: DistillationConfig, parts: Parts) -> TeacherData:
    """Open `algorithm.teacher_data` and verify everything in it, before any work.

    Raises a `DataError` if it is damaged, and a `ConfigError` if its rows were made with another tokenizer or other
    settings (see `open_token_data`), or if the teacher scored them at another temperature than that of the run.
    """
    assert config.teacher_data is not None
    stored = TeacherData(config.teacher_data)
    rows: dict[str, Any] = {"token_data": stored.tokens.path, "train_on": config.train_on}
    open_token_data(SFTConfig(**rows, max_tokens=config.max_tokens), parts)
    stored.verify()
    temperature = parts.config.generation.temperature or 1.0
    if stored.meta.temperature != temperature:
        raise ConfigError(
            f"algorithm.teacher_data={str(config.teacher_data)!r} has log-probabilities at temperature "
            f"{stored.meta.temperature:g}, but generation.temperature={temperature:g}; set it to that, or score again"
        )
    return stored


def student_rows(config: DistillationConfig, batch_size: int, seed: int, step: int) -> int:
    """Return how many rows of the batch of `step`, counted from 1, the student generates; the first ones.

    It depends on nothing else, so that a resumed run goes on with the same mixture. Over steps, `rows` has the fraction
    of all rows, less than one row off.
    """
    if config.mixing == "batches":
        return batch_size if np.random.default_rng([seed, step, 1]).random() < config.student_fraction else 0
    share = config.student_fraction * batch_size
    return floor(share * step + 1e-6) - floor(share * (step - 1) + 1e-6)  # so that 0.1 * 10 * 3 is 3
