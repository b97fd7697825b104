"""A teacher's log-probabilities of the tokens of a batch, as the losses of distillation read them."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from rlframework.algorithms.losses.distillation import SFT_WEIGHTS, TEACHER_LOGPROBS
from rlframework.algorithms.losses.terms import kl_divergence
from rlframework.base.errors import ConfigError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.distillation_algorithms import DistillationConfig
from rlframework.config.policy import PolicyConfig
from rlframework.huggingface.model_directories import model_sizes
from rlframework.interfaces.loss import TOKEN_SETS
from rlframework.plugins.manager import load_from_plugin
from rlframework.policy.client import Policy
from rlframework.rollout.parts import Parts

Rows = BatchedDataDict[Any]


class Scorer(Protocol):
    """Methods that distillation calls of a `Policy`, or of a teacher behind an endpoint."""

    def get_logprobs(self, data: Rows, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """Return `logprobs [B, S]`: see `PolicyWorker.get_logprobs`."""
        ...

    def get_topk_logits(self, data: Rows, k: int, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """Return the k most likely tokens: see `PolicyWorker.get_topk_logits`."""
        ...

    def get_token_set_logprobs(self, data: Rows, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """Return `set_logprobs [B, S, K]`: see `PolicyWorker.get_token_set_logprobs`."""
        ...

    def rest(self) -> None:
        """Free what is not needed until the next call."""
        ...


def open_teacher(parts: Parts, config: DistillationConfig) -> Scorer | None:
    """Return the teacher of a run; None if its log-probabilities are stored.

    Raises a `ConfigError` if all tokens are compared and the vocabularies of both models have different sizes.
    """
    if config.teacher_data is not None:
        return None
    if config.endpoint is not None:
        teacher_at = load_from_plugin(parts.config.plugins, "rlframework_teacher_endpoint", "algorithm.endpoint")
        scorer: Scorer = teacher_at(config.endpoint, parts.tokenizer, parts.config.generation.temperature or 1.0)
        return scorer
    teacher = parts.models["teacher"]
    sizes = vocabulary(parts.config.policy), vocabulary(teacher.config.policy)
    if config.tokens == "all" and sizes[0] != sizes[1]:
        raise ConfigError(
            f"algorithm.tokens=all compares whole vocabularies, but the policy's head has {sizes[0]:,} tokens and the "
            f"teacher's {sizes[1]:,}; set algorithm.tokens=teacher_top_k"
        )
    return teacher


def vocabulary(config: PolicyConfig) -> int:
    """Return the number of tokens of a model's head."""
    _, size = model_sizes(config.model_name, config.trust_remote_code)
    if size is None:
        raise ConfigError(f"the configuration of {config.model_name!r} has no vocab_size; set algorithm.tokens=sampled")
    return size


def add_targets(
    data: Rows, student: Policy, teacher: Scorer, config: DistillationConfig, *, sampled: bool
) -> dict[str, float]:
    """Add to `data` what the losses read of the teacher, of the sampled tokens or of sets; return metrics."""
    student.prepare_for_lp_inference()
    if sampled:
        metrics = add_rewards(data, student, teacher, config)
    else:
        metrics, most = {}, vocabulary(student.config.policy)
        chooser: Scorer = student if config.tokens == "student_top_k" else teacher
        add_token_sets(data, chooser, teacher, most if config.tokens == "all" else min(config.top_k, most))
    teacher.rest()
    return metrics


def add_token_sets(data: Rows, chooser: Scorer, teacher: Scorer, top_k: int) -> None:
    """Add the `top_k` most likely tokens of `chooser` as `token_sets [B, S, k]`, and the teacher's log-probabilities.

    Both are 0 at positions that are not in the loss.
    """
    found = chooser.get_topk_logits(data, top_k, positions="loss")
    data[TOKEN_SETS] = found["topk_indices"].int()
    if chooser is teacher:
        data[TEACHER_LOGPROBS] = found["topk_logits"] - found["topk_normalizers"][..., None]
    else:
        data[TEACHER_LOGPROBS] = teacher.get_token_set_logprobs(data, positions="loss")["set_logprobs"]


def add_rewards(data: Rows, student: Scorer, teacher: Scorer, config: DistillationConfig) -> dict[str, float]:
    """Add what the policy gradient reads: `prev_logprobs`, and as `advantages` the reward of each token.

    It is minus the estimate of the KL divergence of the student from the teacher. Returns the mean of the log-ratio,
    the unbiased estimate.
    """
    data["prev_logprobs"] = logprobs = student.get_logprobs(data, positions="loss")["logprobs"]
    theirs = teacher.get_logprobs(data, positions="loss")["logprobs"]
    data["advantages"] = -kl_divergence(logprobs, theirs, config.estimator, config.reward_max)
    mask = _counted(data)
    return {"train/divergence": float(((logprobs - theirs) * mask).sum() / mask.sum().clamp(min=1.0))}


def add_sft_weights(data: Rows, of_data: Tensor) -> None:
    """Add the weights of the mean over the tokens of the rows `of_data [B]` bool, the completions of the data."""
    weights = _counted(data) * of_data[:, None]
    data[SFT_WEIGHTS] = weights / weights.sum().clamp(min=1.0)


def _counted(data: Rows) -> Tensor:
    """Return 1 at tokens that are in the loss, `[B, S]`."""
    mask: Tensor = data["token_mask"] * data["sample_mask"][:, None]
    mask[:, 0] = 0.0
    return mask
