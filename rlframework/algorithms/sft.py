"""Supervised training on the completions of the environment's samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rlframework.algorithms.loop import StepLoop, Timer
from rlframework.algorithms.losses import NLLLoss
from rlframework.algorithms.rollout import pad_rows
from rlframework.config.algorithms import SFTConfig
from rlframework.data.chat import render_completion, render_prompt
from rlframework.data.loader import PromptLoader
from rlframework.distributed.batched_data_dict import BatchedDataDict
from rlframework.errors import DataError
from rlframework.interfaces.algorithm import Parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlframework.interfaces.environment import Sample
    from rlframework.plugins.hookspec import SampleRecord


class SFT(StepLoop):
    """One global batch a step; the loss is on the completion and its end token."""

    config: SFTConfig

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        if not self.train_samples[0].completion:
            raise DataError(f"environment {parts.config.environment.name!r} has no completions to train on")
        self.inputs.rows(self.train_samples)
        self.loader = PromptLoader(self.train_samples, parts.config.policy.train_global_batch_size, parts.config.seed)
        self.loss = NLLLoss()

    def train_step(self, step: int, timer: Timer) -> tuple[dict[str, float], list[SampleRecord]]:
        """See `StepLoop.train_step`."""
        with timer.phase("data"):
            batch = self.encode(next(self.loader))
        with timer.phase("train"):
            self.parts.policy.prepare_for_training()
            result = self.parts.policy.train(batch, self.loss)
        metrics = {
            "train/loss": result["loss"],
            "train/grad_norm": float(result["grad_norm"].mean()),
            "train/lr": result["lr"],
            "train/skipped_steps": float(result["skipped"]),
            "train/tokens": float(batch["input_lengths"].sum()),
            "train/global_valid_toks": result["global_valid_toks"],
        }
        return metrics, []

    def should_stop(self, metrics: dict[str, float]) -> bool:
        """Whether a validation reached `stop_at_accuracy`."""
        goal = self.config.stop_at_accuracy
        return goal is not None and metrics.get("validation/accuracy", 0.0) >= goal

    def encode(self, samples: Sequence[Sample]) -> BatchedDataDict[Any]:
        """The batch of `samples`: prompt and completion in a row, the mask on the completion."""
        prompts = [render_prompt(self.parts.tokenizer, sample.messages) for sample in samples]
        completions = [render_completion(self.parts.tokenizer, sample) for sample in samples]
        rows = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        input_ids, lengths = pad_rows(rows, self.parts.tokenizer.pad_token_id)
        columns = torch.arange(input_ids.shape[1])
        starts = torch.tensor([len(prompt) for prompt in prompts])
        mask = (columns >= starts[:, None]) & (columns < lengths[:, None])
        return BatchedDataDict(
            {
                "input_ids": input_ids,
                "input_lengths": lengths,
                "token_mask": mask.float(),
                "sample_mask": torch.ones(len(samples)),
            }
        )
