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
from rlframework.config.sections import RunConfig
from rlframework.datasets.loader import PromptLoader
from rlframework.errors import ConfigError
from rlframework.interfaces.environment import has_episodes
from rlframework.interfaces.loss import LossFunction
from rlframework.plugins.user_defined import load_loss
from rlframework.policy.microbatching import average_metrics
from rlframework.rollout.optimizer_steps import optimizer_steps
from rlframework.rollout.result import Rollout
from rlframework.rollout.rollouts import rollout
from rlframework.rollout.seeds import row_seeds
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

    @classmethod
    def samples_per_step(cls, config: RunConfig) -> int:
        """Return `prompts_per_step`."""
        assert isinstance(config.algorithm, GRPOConfig)
        return config.algorithm.prompts_per_step

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
        if has_episodes(parts.environment) and self.config.overlong.buffer:
            raise ConfigError(
                f"algorithm.overlong.buffer={self.config.overlong.buffer} penalizes completions near "
                "generation.max_new_tokens, which limits a turn and not an episode; set it to 0, or let the "
                "environment return a penalty"
            )
        self.inputs.rollouts(self.train_samples, scored=self.scores_before_training or self.uses_reference)

    def train_step(self, step: int, timer: Timer) -> StepResult:
        """See `StepLoop.train_step`."""
        samples = [sample for sample in next(self.loader) for _ in range(self.config.samples_per_prompt)]
        self.parts.generation.prepare_for_generation()  # before the timer: a refit does not count as generation
        with timer.phase("generate"):
            result = rollout(self.parts, samples, row_seeds(self.parts.config.seed, step, len(samples)))
        metrics = self._add_advantages(result)
        data, rows = optimizer_steps(
            result.data,
            result.episode_of,
            episodes=self.parts.config.policy.train_global_batch_size,
            ranks=self.parts.policy.data_parallel_size,
            level=getattr(self.config.loss, "level", "token"),
        )
        with timer.phase("logprobs"):
            self._add_logprobs(data)
        with timer.phase("train"):
            self.parts.policy.prepare_for_training()
            trained = [self.train(step, data, self.loss, rows) for _ in range(self.config.epochs_per_batch)]
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
            left_out=result.failed,
        )
        data["advantages"] = advantages[result.episode_of][:, None] * data["token_mask"]
        if config.skip_zero_variance and not config.loss.kl_coef:  # a KL term still gives these rows a gradient
            data["sample_mask"][constant[result.episode_of]] = 0.0
        if config.overlong.drop_truncated:
            data["sample_mask"][result.truncated[result.episode_of]] = 0.0
        return {f"train/{name}": value for name, value in result.metrics.items()} | {
            "train/reward_std": reward_std(result.rewards, config.samples_per_prompt, result.failed),
            "train/shaped_reward": float(shaped[~result.failed].mean()),
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
    left_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the advantage of each sample within its group, and the samples of groups without variance.

    `rewards [B]` is fp32, with groups of `samples_per_prompt` consecutive samples. The baseline is the mean of the
    group (GRPO, arXiv:2402.03300) or, with `leave_one_out`, the mean of the group's other samples (RLOO,
    arXiv:2402.14740). `normalize_std` divides by the group's standard deviation (with n - 1) plus `eps`. Samples that
    are `left_out [B]` bool have advantage 0, and the others are those of a group without them. Returns
    `advantages [B]` fp32 and `constant [B]` bool, True for samples of groups whose rewards are all equal; their
    advantages are 0.
    """
    if left_out is not None and bool(left_out.any()):
        return _advantages_without(rewards, samples_per_prompt, leave_one_out, normalize_std, eps, left_out)
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


def _advantages_without(
    rewards: Tensor, samples_per_prompt: int, leave_one_out: bool, normalize_std: bool, eps: float, left_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply `group_advantages` to each group without those `left_out`; a group of one has no variance."""
    advantages, constant = torch.zeros(len(rewards)), torch.ones(len(rewards), dtype=torch.bool)
    for rows in torch.arange(len(rewards)).view(-1, samples_per_prompt):
        kept = rows[~left_out[rows]]
        if len(kept) > 1:
            advantages[kept], equal = group_advantages(
                rewards[kept], len(kept), leave_one_out=leave_one_out, normalize_std=normalize_std, eps=eps
            )
            constant[rows] = equal[0]
    return advantages, constant


def reward_std(rewards: Tensor, samples_per_prompt: int, failed: Tensor) -> float:
    """Return the mean over groups of the standard deviation (with n - 1) of their rewards, without those `failed`."""
    groups, kept = rewards.view(-1, samples_per_prompt), ~failed.view(-1, samples_per_prompt)
    if bool(kept.all()):
        return float(groups.std(1).mean())
    spreads = [float(group[keep].std()) for group, keep in zip(groups, kept, strict=True) if int(keep.sum()) > 1]
    return sum(spreads) / len(spreads) if spreads else 0.0


def overlong_penalty(lengths: Tensor, max_new_tokens: int, buffer: int, penalty: float) -> Tensor:
    """Return the penalty to add to the rewards of long completions (DAPO, arXiv:2503.14476, eq. 13).

    It is 0 up to `max_new_tokens - buffer` tokens, then falls linearly to `-penalty` at `max_new_tokens`. `lengths [B]`
    int64 are those of the completions. Returns `[B]` fp32, all 0 if `buffer` is 0.
    """
    if buffer == 0:
        return torch.zeros(len(lengths))
    over = (lengths - (max_new_tokens - buffer)).clamp(min=0, max=buffer)
    return -penalty * over.float() / buffer
