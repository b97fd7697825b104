"""Group-relative policy optimization (arXiv:2402.03300), with the options of its descendants.

A step generates rollouts, scores them, computes advantages within each group, computes log-probabilities if the batch
takes several optimizer steps or a reference policy is used, and trains.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlframework.algorithm import Parts
from rlframework.algorithms.losses import ClippedPGLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig, GRPOConfig
from rlframework.datasets.loader import PromptLoader
from rlframework.interfaces.loss import LossFunction
from rlframework.plugins.user_defined import load_loss
from rlframework.policy.microbatching import average_metrics
from rlframework.rollout.single_turn import Rollout, rollout, row_seeds
from rlframework.training.loop import StepLoop, StepResult, Timer, training_metrics


class GRPO(StepLoop):
    """Train on rollouts with group-relative advantages; see `GRPOConfig` for the options."""

    config: GRPOConfig

    @classmethod
    def needs_reference_model(cls, config: GRPOConfig) -> bool:
        """Whether the loss has a KL term."""
        return config.loss.kl_coef > 0

    @classmethod
    def training_calls(cls, config: GRPOConfig) -> int:
        """Return one call for each pass over each batch."""
        return config.num_steps * config.epochs_per_batch

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.loader = PromptLoader(self.train_samples, self.config.prompts_per_step, parts.config.seed)
        section = self.config.loss
        if isinstance(section, ClippedPGLossConfig):
            self.loss: LossFunction = ClippedPGLoss(section)
        else:
            self.loss = load_loss(section.name, section.keys)
        rows = self.config.prompts_per_step * self.config.samples_per_prompt
        steps_on_batch = self.config.epochs_per_batch * rows // parts.config.policy.train_global_batch_size
        # a single optimizer step per batch is on-policy, so the loss does not need `prev_logprobs`
        self.scores_before_training = steps_on_batch > 1
        self.uses_reference = self.needs_reference_model(self.config)
        self.inputs.rollouts(self.train_samples, scored=self.scores_before_training or self.uses_reference)

    def train_step(self, step: int, timer: Timer) -> StepResult:
        """See `StepLoop.train_step`."""
        samples = [sample for sample in next(self.loader) for _ in range(self.config.samples_per_prompt)]
        self.parts.generation.prepare_for_generation()  # before the timer: a refit does not count as generation
        with timer.phase("generate"):
            result = rollout(self.parts, samples, row_seeds(self.parts.config.seed, step, len(samples)))
        metrics = self._add_advantages(result)
        with timer.phase("logprobs"):
            self._add_logprobs(result.data)
        with timer.phase("train"):
            self.parts.policy.prepare_for_training()
            trained = [self.train(step, result.data, self.loss) for _ in range(self.config.epochs_per_batch)]
        means = average_metrics([result["metrics"] for result in trained])
        metrics |= training_metrics(trained) | {f"train/{name}": value for name, value in means.items()}
        metrics["train/tokens"] = float(result.data["input_lengths"].sum())
        return metrics, result.records(step, "train", self.parts.config.observers.samples)

    def _add_advantages(self, result: Rollout) -> dict[str, float]:
        """Add `advantages` and the final `sample_mask` (0: not computed or counted) to the data; return its metrics."""
        config, data = self.config, result.data
        limit = self.parts.config.generation.max_new_tokens
        shaped = result.rewards + overlong_penalty(
            result.completion_lengths, limit, config.overlong.buffer, config.overlong.penalty
        )
        advantages, constant = group_advantages(
            shaped,
            config.samples_per_prompt,
            leave_one_out=config.leave_one_out,
            normalize_std=config.normalize_std,
            eps=config.std_epsilon,
        )
        data["advantages"] = advantages[:, None] * data["token_mask"]
        if config.skip_zero_variance and not config.loss.kl_coef:  # a KL term still gives these rows a gradient
            data["sample_mask"][constant] = 0.0
        if config.overlong.drop_truncated:
            data["sample_mask"][result.truncated] = 0.0
        return {f"train/{name}": value for name, value in result.metrics.items()} | {
            "train/reward_std": float(result.rewards.view(config.prompts_per_step, -1).std(1).mean()),
            "train/shaped_reward": float(shaped.mean()),
            "train/zero_variance_groups": float(constant.sum()) / config.samples_per_prompt,
        }

    def _add_logprobs(self, data: BatchedDataDict[Any]) -> None:
        """Add `prev_logprobs` and `reference_policy_logprobs` to `data`, where they are needed."""
        policy = self.parts.policy
        if self.scores_before_training or self.uses_reference:
            policy.prepare_for_lp_inference()
        if self.scores_before_training:
            data["prev_logprobs"] = policy.get_logprobs(data, positions="loss")["logprobs"]
        if self.uses_reference:
            scored = policy.get_reference_policy_logprobs(data, positions="loss")
            data["reference_policy_logprobs"] = scored["reference_logprobs"]


def group_advantages(
    rewards: Tensor,
    samples_per_prompt: int,
    *,
    leave_one_out: bool = False,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Return the advantage of each sample within its group, and the rows of groups without variance.

    `rewards [B]` is fp32, with groups of `samples_per_prompt` consecutive rows. The baseline is the mean of the group
    (GRPO, arXiv:2402.03300) or, with `leave_one_out`, the mean of the group's other rows (RLOO, arXiv:2402.14740).
    `normalize_std` divides by the group's standard deviation (with n - 1) plus `eps`. Returns `advantages [B]` fp32 and
    `constant [B]` bool, True for rows of groups whose rewards are all equal; their advantages are 0.
    """
    groups = rewards.float().view(-1, samples_per_prompt)
    groups = groups - groups[:, :1]  # exact for similar rewards, and their sum keeps the digits of their differences
    count = groups.shape[1]
    total = groups.sum(1, keepdim=True)
    baseline = (total - groups) / (count - 1) if leave_one_out else total / count
    advantages = groups - baseline
    if normalize_std:
        advantages = advantages / (groups.std(1, keepdim=True) + eps)
    constant = (groups == 0).all(1, keepdim=True).expand_as(groups)
    advantages = torch.where(constant, torch.zeros_like(advantages), advantages)
    return advantages.reshape(-1), constant.reshape(-1)


def overlong_penalty(lengths: Tensor, max_new_tokens: int, buffer: int, penalty: float) -> Tensor:
    """Return the penalty to add to the rewards of long completions (DAPO, arXiv:2503.14476, eq. 13).

    It is 0 up to `max_new_tokens - buffer` tokens, then falls linearly to `-penalty` at `max_new_tokens`. `lengths [B]`
    int64 are those of the completions. Returns `[B]` fp32, all 0 if `buffer` is 0.
    """
    if buffer == 0:
        return torch.zeros(len(lengths))
    over = (lengths - (max_new_tokens - buffer)).clamp(min=0, max=buffer)
    return -penalty * over.float() / buffer
