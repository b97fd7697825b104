"""Group-relative policy optimization (arXiv:2402.03300) and the algorithms that are other settings of it.

A step generates rollouts, scores them, computes advantages, computes log-probabilities if the batch takes several
optimizer steps or a reference policy is used, and trains. Names and defaults are in `config.algorithm_presets`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any, ClassVar

from rlframework.algorithms.advantages import METRICS, add_advantages
from rlframework.algorithms.algorithm import RunResult
from rlframework.algorithms.loop import StepLoop, StepResult, Timer, training_metrics
from rlframework.algorithms.losses import ClippedPGLoss
from rlframework.algorithms.reward_groups import RewardSpread, sample_groups
from rlframework.base.errors import ConfigError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig, GRPOConfig, OwnPolicyLossConfig
from rlframework.config.sections import AlgorithmConfig, RunConfig
from rlframework.interfaces.environment import has_episodes
from rlframework.interfaces.loss import LossFunction
from rlframework.policy.microbatching import average_metrics
from rlframework.rollout.optimizer_steps import optimizer_steps
from rlframework.rollout.parts import Parts
from rlframework.rollout.result import Rollout
from rlframework.rollout.step_rollouts import StepRollouts, SynchronousRollouts

_LOG = logging.getLogger(__name__)


class GRPO(StepLoop):
    """Train on rollouts with group-relative advantages; see `GRPOConfig` for the options."""

    config_model: ClassVar[type[AlgorithmConfig]] = GRPOConfig
    config: GRPOConfig

    @classmethod
    def needs_reference_model(cls, config: GRPOConfig) -> bool:
        """Whether there is a KL term in the loss or in the reward."""
        return config.loss.kl_coef > 0 or config.reward_kl_coef > 0

    @classmethod
    def further_policies(cls, config: RunConfig) -> Mapping[str, int]:
        """Return the reward model, if there is one."""
        return {} if config.reward_model is None else {"reward_model": 0}

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
        size = self.config.prompts_per_step, self.config.samples_per_prompt
        if self.config.asynchronous is None:
            self.rollouts: StepRollouts = SynchronousRollouts(parts, *size)
        else:
            from rlframework.rollout.asynchronous import AsynchronousRollouts

            self.rollouts = AsynchronousRollouts(parts, self.config.asynchronous, *size, self.config.num_steps)
        self.loader = self.rollouts
        self._noted_equal_groups = False
        self._reward_spread = RewardSpread(self.config.samples_per_prompt)
        self.loss = policy_loss(self.config, parts.config.generation.max_new_tokens)
        self.own_advantage = _own_advantage(self.config)
        rows = self.config.prompts_per_step * self.config.samples_per_prompt
        steps_on_batch = self.config.epochs_per_batch * rows // parts.config.policy.train_global_batch_size
        # a single optimizer step per batch is on-policy, so the loss does not need `prev_logprobs`
        self.penalizes_reward = self.config.reward_kl_coef > 0
        own_reads = getattr(self.loss, "reads", ()) if isinstance(self.config.loss, OwnPolicyLossConfig) else ()
        self.scores_before_training = steps_on_batch > 1 or self.penalizes_reward or "prev_logprobs" in own_reads
        self.uses_reference = self.needs_reference_model(self.config)
        if self.penalizes_reward and self.config.loss.kl_coef > 0:
            _LOG.warning(
                "algorithm.reward_kl.coef=%g and algorithm.loss.kl_coef=%g: the divergence from the reference is "
                "penalized twice, in the reward and in the loss; set one of them to 0, unless you want both",
                self.config.reward_kl_coef,
                self.config.loss.kl_coef,
            )
        if has_episodes(parts.environment) and self.config.overlong.buffer:
            raise ConfigError(
                f"algorithm.overlong.buffer={self.config.overlong.buffer} penalizes completions near "
                "generation.max_new_tokens, which limits a turn and not an episode; set it to 0, or let the "
                "environment return a penalty"
            )
        self.inputs.rollouts(self.train_samples, scored=self.scores_before_training or self.uses_reference)

    def train_step(self, step: int, timer: Timer) -> StepResult:
        """See `StepLoop.train_step`."""
        result = self._rollout(step, timer)
        if self.penalizes_reward:
            with timer.phase("logprobs"):
                self._add_logprobs(result.data)
        metrics = self.rollouts.take(step) | self.add_advantages(result, timer)
        self._note_equal_groups(step, result, metrics)
        if "train/zero_variance_groups" in metrics and self._divides_by_deviation:
            self._reward_spread.note(step, result)
        metrics |= self.train_on(step, result, timer)
        metrics["train/tokens"] = float(result.data["input_lengths"].sum())
        return metrics, result.records(step, "train", self.parts.config.observers.samples, self.parts.tokenizer)

    def add_advantages(self, result: Rollout, timer: Timer) -> dict[str, float]:
        """Add `advantages [R, T]` fp32 and the final `sample_mask` to the data of `result`; return metrics."""
        return add_advantages(result, self.config, self.parts.config.generation.max_new_tokens, self.own_advantage)

    def train_on(self, step: int, result: Rollout, timer: Timer) -> dict[str, float]:
        """Train on `result`, which has advantages, in step `step`; return metrics."""
        data, rows = optimizer_steps(
            result.data,
            result.episode_of,
            episodes=self.parts.config.policy.train_global_batch_size,
            ranks=self.parts.policy.data_parallel_size,
            level=getattr(self.config.loss, "level", "token"),
        )
        if not self.penalizes_reward:
            with timer.phase("logprobs"):
                self._add_logprobs(data)
        with timer.phase("train"):
            self.parts.policy.prepare_for_training()
            trained = [self.train(step, data, self.loss, rows) for _ in range(self.config.epochs_per_batch)]
        means = average_metrics([result["metrics"] for result in trained])
        rollout = [f"train/{name}" for name in (*result.metrics, *METRICS)]
        return self.with_loss_metrics(training_metrics(trained), means, taken=rollout)

    def _rollout(self, step: int, timer: Timer) -> Rollout:
        """Return the rollout of step `step`, several in one with `dynamic_sampling`."""
        self.rollouts.publish(step - 1)  # before the timer: a refit does not count as generation
        with timer.phase("generate"):
            return sample_groups(
                partial(self.rollouts.rollout, step),
                groups=self.config.prompts_per_step,
                samples_per_prompt=self.config.samples_per_prompt,
                rounds=self.config.dynamic_sampling,
                pad_id=self.parts.tokenizer.pad_token_id or 0,
            )

    @property
    def _divides_by_deviation(self) -> bool:
        """Whether small differences within a group become advantages of the usual size."""
        config = self.config
        divides = bool(config.normalize_std) or config.batch_normalization != "none"
        return divides and config.group_baseline and self.own_advantage is None

    def _note_equal_groups(self, step: int, result: Rollout, metrics: Mapping[str, float]) -> None:
        """Log, once a run, that no group of the rollout has different rewards."""
        groups = len(result.rewards) // self.config.samples_per_prompt
        none_differs = metrics.get("train/zero_variance_groups", 0.0) >= groups
        if self._noted_equal_groups or not none_differs or not self.config.group_baseline:
            return
        self._noted_equal_groups = True
        rewards = result.rewards[~result.failed]
        low, high = float(rewards.min()), float(rewards.max())
        found = f"all are {low:g}" if low == high else f"they are {low:g} to {high:g}"
        _LOG.warning(
            "step %d: in each of the %d groups all rewards are equal (%s), so every advantage is 0 and there is "
            "nothing to learn from them. If this goes on (metric train/zero_variance_groups): with the lowest reward, "
            "the task is too hard, or the reward function never finds the answer (samples.jsonl has completions); with "
            "the highest, it is too easy. docs/curves.md lists what to change",
            step,
            groups,
            found,
        )

    def validate(self, step: int) -> StepResult:
        """See `StepLoop.validate`. Ends generation for later steps meanwhile, if there is any."""
        self.rollouts.finish()
        return super().validate(step)

    def run(self) -> RunResult:
        """See `StepLoop.run`."""
        with closing(self.rollouts):
            return super().run()

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


def _own_advantage(config: GRPOConfig) -> Any:
    """Return the user's function of `algorithm.advantage`; None if there is none."""
    if config.advantage is None:
        return None
    from rlframework.plugins.user_defined import load_advantage

    return load_advantage(config.advantage)


def policy_loss(config: GRPOConfig, max_new_tokens: int) -> LossFunction:
    """Return the loss of `config`; `max_new_tokens` is its constant length if it has none."""
    section = config.loss
    if not isinstance(section, ClippedPGLossConfig):
        from rlframework.plugins.user_defined import load_loss

        own: LossFunction = load_loss(section.name, section.keys)
        return own
    if section.level == "constant" and section.constant_length is None:
        section = section.model_copy(update={"constant_length": max_new_tokens})
    return ClippedPGLoss(section)
