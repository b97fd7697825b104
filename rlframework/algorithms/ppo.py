"""Proximal policy optimization with a critic (arXiv:1707.06347), whose advantages are those of arXiv:1506.02438.

A step is that of `GRPO` with other advantages: the critic predicts the value of each token of a rollout, is trained on
the returns, and the policy on the advantages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from rlframework.algorithms.advantages import batch_normalized, shaped_rewards, token_advantages
from rlframework.algorithms.grpo import GRPO
from rlframework.algorithms.loop import Timer, training_metrics
from rlframework.algorithms.losses import ValueLoss
from rlframework.base.errors import ConfigError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import GRPOConfig, PPOConfig
from rlframework.config.sections import RunConfig
from rlframework.interfaces.policy_worker import TrainResult
from rlframework.policy.microbatching import average_metrics
from rlframework.rollout.optimizer_steps import optimizer_steps
from rlframework.rollout.parts import Parts
from rlframework.rollout.result import Rollout


class PPO(GRPO):
    """Train the policy and its critic on rollouts; see `PPOConfig` for the options."""

    config_model = PPOConfig
    config: PPOConfig

    @classmethod
    def further_policies(cls, config: RunConfig) -> Mapping[str, int]:
        """Return also the critic, which is trained in each pass over each batch."""
        assert isinstance(config.algorithm, PPOConfig)
        calls = config.algorithm.num_steps * config.algorithm.epochs_per_batch
        return {"critic": calls, **super().further_policies(config)}

    @classmethod
    def training_calls(cls, config: GRPOConfig) -> int:
        """Return one call for each pass over each batch after those that train the critic alone."""
        assert isinstance(config, PPOConfig)
        return max(0, config.num_steps - config.critic_warmup) * config.epochs_per_batch

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.critic, self.value_loss = parts.models["critic"], ValueLoss(self.config.value_loss)
        if (head := self.critic.config.policy.head) != "value":
            raise ConfigError(f"critic.head is {head}, but PPO needs a critic with critic.head=value")
        warmup, steps = self.config.critic_warmup, self.config.num_steps
        if warmup >= steps:
            raise ConfigError(
                f"algorithm.critic_warmup is {warmup}, but must be less than the number of steps, {steps}: the policy "
                "would never be trained"
            )
        if alone := [step for step in range(1, warmup + 1) if self.recorder.wants(step)]:
            raise ConfigError(
                f"recording selects step {alone[0]}, in which only the critic is trained; record steps after "
                f"algorithm.critic_warmup={warmup}"
            )

    def add_advantages(self, result: Rollout, timer: Timer) -> dict[str, float]:
        """See `GRPO.add_advantages`; also adds `values` and `returns`, `[R, T]` fp32."""
        with timer.phase("values"):
            self.critic.prepare_for_lp_inference()
            result.data["values"] = self.critic.get_values(result.data, positions="loss")["values"]
        return add_advantages(result, self.config, self.parts.config.generation.max_new_tokens)

    def train_on(self, step: int, result: Rollout, timer: Timer) -> dict[str, float]:
        """Train the critic on `result`, and after `critic_warmup` steps the policy; return metrics."""
        with timer.phase("train_critic"):
            metrics = self._train_critic(result)
        return metrics | (super().train_on(step, result, timer) if step > self.config.critic_warmup else {})

    def _train_critic(self, result: Rollout) -> dict[str, float]:
        names = ("input_ids", "input_lengths", "token_mask", "sample_mask", *self.value_loss.reads)
        data, rows = optimizer_steps(
            BatchedDataDict({name: result.data[name] for name in names} | result.data.get_multimodal_dict()),
            result.episode_of,
            episodes=self.critic.config.policy.train_global_batch_size,
            ranks=self.critic.data_parallel_size,
            level="token",
        )
        self.critic.prepare_for_training()
        passes = range(self.config.epochs_per_batch)
        trained = [cast("TrainResult", self.critic.train(data, self.value_loss, gbs=rows)) for _ in passes]
        self.critic.rest()
        found = training_metrics(trained)
        means = average_metrics([each["metrics"] for each in trained])
        metrics = {f"train/{name}": value for name, value in means.items() if name.startswith("value")}
        return metrics | {
            f"train/critic_{name}": found[f"train/{name}"] for name in ("grad_norm", "lr", "skipped_steps")
        }


def add_advantages(result: Rollout, config: PPOConfig, max_new_tokens: int) -> dict[str, float]:
    """Add `advantages` and `returns`, `[R, T]`, and the final `sample_mask` to the data of `result`; return metrics.

    Needs `values` there, and `prev_logprobs` and `reference_policy_logprobs` for a KL penalty in the reward.
    """
    data = result.data
    rewards, penalty, metrics = shaped_rewards(result, config, max_new_tokens)
    advantages, data["returns"] = token_advantages(
        rewards,
        data["values"],
        data["token_mask"],
        result.episode_of,
        gamma=config.gamma,
        lam=config.gae_lambda,
        penalty=penalty,
    )
    data["advantages"] = batch_normalized(advantages, data, config.batch_normalization)
    counted = data["token_mask"] * data["sample_mask"][:, None] != 0
    return metrics | value_metrics(data["values"][counted], data["returns"][counted])


def value_metrics(values: Tensor, returns: Tensor) -> dict[str, float]:
    """Return the means of the `values [N]` and `returns [N]` of the counted tokens, and the explained variance.

    It is 1 for values that are the returns, and 0 for values that are all equal, or if the returns are.
    """
    if not len(values):
        return {}
    spread = returns.double().var(correction=0)
    unexplained = (returns.double() - values).var(correction=0)
    return {
        "train/value": float(values.mean()),
        "train/return": float(returns.mean()),
        "train/explained_variance": float(1.0 - unexplained / spread) if spread > 0 else 0.0,
    }
