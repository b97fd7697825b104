"""Advantages of rollouts: rewards with their penalties, compared within groups, spread over tokens, and normalized.

`GRPOConfig` chooses each step, so the algorithms of the family are settings of one function, `add_advantages`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlframework.algorithms.losses.terms import kl_divergence
from rlframework.base.errors import UserError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import GRPOConfig, RewardKLConfig
from rlframework.rollout.result import Rollout

OwnAdvantage = Callable[[Tensor, Rollout], Tensor]
"""A function of the user's: from the rewards of the groups, `[P, N]`, and the rollout, their advantages, `[P, N]`."""

METRICS = ("reward_kl", "reward_std", "shaped_reward", "zero_variance_groups")
"""Metrics that these functions add to those of a rollout."""

SMALLEST_VARIANCE = 1e-8
"""Of a batch of advantages (arXiv:2501.03262): a lower bound, or a summand, so that equal ones stay 0."""


def add_advantages(
    result: Rollout, config: GRPOConfig, max_new_tokens: int, own: OwnAdvantage | None = None
) -> dict[str, float]:
    """Add `advantages [R, T]` fp32 and the final `sample_mask` (0: not computed or counted) to the data of `result`.

    Needs `prev_logprobs` and `reference_policy_logprobs` there for a KL penalty in the reward. `own` compares the
    rewards of a group instead of `group_advantages`. Returns metrics.
    """
    data, count = result.data, config.samples_per_prompt
    shaped, penalty, metrics = shaped_rewards(result, config, max_new_tokens)
    if own is not None:
        advantages, constant = own_advantages(own, shaped.view(-1, count), result, config.advantage)
    else:
        advantages, constant = group_advantages(
            shaped,
            count,
            group_baseline=config.group_baseline,
            leave_one_out=config.leave_one_out,
            normalize_std=config.normalize_std,
            eps=config.std_epsilon,
            left_out=result.failed,
        )
    tokens = advantages[result.episode_of][:, None] * data["token_mask"]
    if penalty is not None:
        if config.reward_kl is not None and config.reward_kl.spread == "to_go":
            penalty = sum_to_end(penalty, result.episode_of)
        tokens = tokens - penalty * data["token_mask"]
    data["advantages"] = batch_normalized(tokens, data, config.batch_normalization)
    if config.skips_constant_groups:
        data["sample_mask"][constant[result.episode_of]] = 0.0
    return metrics | {"train/zero_variance_groups": float(constant.sum()) / count}


def shaped_rewards(
    result: Rollout, config: GRPOConfig, max_new_tokens: int
) -> tuple[Tensor, Tensor | None, dict[str, float]]:
    """Return the reward of each episode with its penalties, `[E]`, the KL penalty of each token, and metrics.

    The KL penalty is `[R, T]`, or None without one or if its sum is part of the rewards. Sets `sample_mask` to 0 for
    completions that are not counted.
    """
    data, kl = result.data, config.reward_kl
    shaped = result.rewards + overlong_penalty(
        result.completion_lengths, max_new_tokens, config.overlong.buffer, config.overlong.penalty
    )
    metrics = {f"train/{name}": value for name, value in result.metrics.items()}
    penalty: Tensor | None = None
    if kl is not None and kl.coef:
        penalty, metrics["train/reward_kl"] = kl_penalty(data, kl)
        if kl.spread == "sequence":
            shaped, penalty = shaped.index_add(0, result.episode_of, -penalty.sum(1).to(shaped.dtype)), None
    if config.overlong.drop_truncated:
        data["sample_mask"][result.truncated[result.episode_of]] = 0.0
    metrics["train/reward_std"] = reward_std(result.rewards, config.samples_per_prompt, result.failed)
    metrics["train/shaped_reward"] = float(shaped[~result.failed].mean())
    return shaped, penalty, metrics


def batch_normalized(advantages: Tensor, data: BatchedDataDict[Any], kind: str) -> Tensor:
    """Return `advantages [R, T]`, normalized over all counted tokens of `data` unless `kind` is "none"."""
    if kind == "none":
        return advantages
    return normalize(advantages, data["token_mask"] * data["sample_mask"][:, None], sample=kind == "sample")


def group_advantages(
    rewards: Tensor,
    samples_per_prompt: int,
    *,
    group_baseline: bool = True,
    leave_one_out: bool = False,
    normalize_std: bool | str = True,
    eps: float = 1e-6,
    left_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the advantage of each sample within its group, and the samples of groups without variance.

    `rewards [B]` is floating-point, with groups of `samples_per_prompt` consecutive samples. The baseline is the mean
    of the group (GRPO, arXiv:2402.03300) or, with `leave_one_out`, the mean of the group's other samples (RLOO,
    arXiv:2402.14740), or 0 without `group_baseline`. `normalize_std` divides by a standard deviation (with n - 1) plus
    `eps`: that of the group, with "batch" that of all rewards, with "others" that of the group's other rewards, where
    it is not 0. Samples that are `left_out [B]` bool have advantage 0, and the others are those of a group without
    them. Returns `advantages [B]` of the same dtype and `constant [B]` bool, True for samples of groups whose rewards
    are all equal; with a baseline, their advantages are 0.
    """
    kept = torch.ones(len(rewards), dtype=torch.bool) if left_out is None else ~left_out
    spread = rewards[kept].std() if normalize_std == "batch" and int(kept.sum()) > 1 else None
    within = normalize_std != "batch" and normalize_std
    options = (group_baseline, leave_one_out, within, eps)
    if bool(kept.all()):
        advantages, constant = _of_groups(rewards, samples_per_prompt, *options)
    else:
        advantages, constant = torch.zeros_like(rewards), torch.ones(len(rewards), dtype=torch.bool)
        for rows in torch.arange(len(rewards)).view(-1, samples_per_prompt):
            rest = rows[kept[rows]]
            if len(rest) > group_baseline:  # compared with itself, a sample has the advantage 0
                advantages[rest], equal = _of_groups(rewards[rest], len(rest), *options)
                constant[rows] = equal[0]
    return advantages if spread is None else advantages / (spread + eps), constant


def own_advantages(
    own: OwnAdvantage, rewards: Tensor, result: Rollout, name: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return the advantages `[B]` that `own` gives to groups of `rewards [P, N]`; 0 for samples that have failed.

    Also returns `constant [B]` bool, True for samples of groups whose advantages are all 0. Raises a `UserError` with
    the `name` of the function if it returns something else than a finite number for each reward.
    """
    found = own(rewards.clone(), result)
    if not isinstance(found, Tensor) or found.shape != rewards.shape:
        got = f"of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"of class {type(found).__name__}"
        raise UserError(
            f"algorithm.advantage={name!r} returned a value {got}; it must return a tensor of shape "
            f"{tuple(rewards.shape)}: one advantage for each reward, by prompt"
        )
    if len(bad := (~found.isfinite()).any(1).nonzero()):
        raise UserError(
            f"algorithm.advantage={name!r} returned {found[int(bad[0])].tolist()} for the rewards "
            f"{rewards[int(bad[0])].tolist()}; advantages must be finite: if it divides by a standard deviation, that "
            "is 0 where all rewards are equal"
        )
    found = found.detach().to(rewards).masked_fill(result.failed.view_as(rewards), 0.0)
    constant = (found == 0).all(1, keepdim=True).expand_as(found)
    return found.reshape(-1), constant.reshape(-1)


def _of_groups(
    rewards: Tensor, count: int, group_baseline: bool, leave_one_out: bool, normalize_std: bool | str, eps: float
) -> tuple[Tensor, Tensor]:
    """Apply `group_advantages` to whole groups of `count` samples."""
    groups = rewards.view(-1, count)
    offset = groups[:, :1]
    groups = groups - offset  # exact for similar rewards, and their sum keeps the digits of their differences
    constant = (groups == 0).all(1, keepdim=True).expand_as(groups)
    if not group_baseline:
        advantages = groups + offset
    else:
        total = groups.sum(1, keepdim=True)
        advantages = groups - ((total - groups) / (count - 1) if leave_one_out else total / count)
    if normalize_std == "others":
        advantages = _divided_by_others(advantages, groups, eps)
    elif normalize_std and count > 1:
        advantages = advantages / (groups.std(1, keepdim=True) + eps)
    if group_baseline:
        advantages = torch.where(constant, torch.zeros_like(advantages), advantages)
    return advantages.reshape(-1), constant.reshape(-1)


def _divided_by_others(advantages: Tensor, groups: Tensor, eps: float) -> Tensor:
    """Divide by the standard deviation of the other rewards of `groups [G, n]` plus `eps`, unless that is 0."""
    count = groups.shape[1]
    if count < 3:  # a single other reward has no deviation
        return advantages
    centered = groups.double() - groups.double().mean(1, keepdim=True)
    squares = centered.square().sum(1, keepdim=True)
    others = squares - centered.square() - centered.square() / (count - 1)  # their mean is -centered / (count - 1)
    others = torch.where(others > 1e-12 * squares, others, 0.0)  # a difference of squares: the rest is rounding
    deviation = (others / (count - 2)).sqrt()
    return torch.where(deviation > 0, advantages / (deviation + eps), advantages).to(advantages.dtype)


def kl_penalty(data: BatchedDataDict[Any], config: RewardKLConfig) -> tuple[Tensor, float]:
    """Return the penalty of each token, `[R, T]`, 0 outside of counted completions, and the mean KL of these tokens."""
    mask = data["token_mask"] * data["sample_mask"][:, None]
    kl = kl_divergence(data["prev_logprobs"], data["reference_policy_logprobs"], config.estimator, config.max) * mask
    return config.coef * kl, float(kl.sum() / mask.sum().clamp(min=1.0))


def sum_to_end(values: Tensor, episode_of: Tensor) -> Tensor:
    """Return for each token the sum of `values [R, T]` from it to the end of its episode, whose rows are adjacent."""
    within = values.flip(1).cumsum(1).flip(1)
    totals = within[:, :1].double().flip(0).cumsum(0).flip(0)  # of a row and all that follow
    last = torch.searchsorted(episode_of, episode_of, right=True)  # the row after the episode
    after = torch.cat((totals, totals.new_zeros(1, 1)))
    return within + (after[1:] - after[last]).to(values.dtype)


def normalize(advantages: Tensor, mask: Tensor, *, sample: bool) -> Tensor:
    """Return `advantages [R, T]` minus their mean over `mask`, divided by their standard deviation; 0 outside.

    The variance is divided by n and at least `SMALLEST_VARIANCE`, or with `sample` by n - 1 and greater by it.
    """
    count = mask.sum()
    centered = (advantages - (advantages * mask).sum() / count.clamp(min=1.0)) * mask
    squares = centered.square().sum()
    if sample:
        variance = squares / (count - 1.0).clamp(min=1.0) + SMALLEST_VARIANCE
    else:
        variance = (squares / count.clamp(min=1.0)).clamp(min=SMALLEST_VARIANCE)
    return centered * variance.rsqrt()


def reward_std(rewards: Tensor, samples_per_prompt: int, failed: Tensor) -> float:
    """Return the mean over groups of the standard deviation (with n - 1) of their rewards, without those `failed`.

    A group of one has no deviation and does not count; 0 if there are no others.
    """
    groups, kept = rewards.view(-1, samples_per_prompt), ~failed.view(-1, samples_per_prompt)
    if bool(kept.all()) and samples_per_prompt > 1:
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


def generalized_advantages(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Return the advantages `[E, L]` of the tokens of E episodes, the sums over k of (gamma lam)^k delta(t + k).

    `rewards` and `values` are `[E, L]`, 0 after the end of an episode. delta(t) = r(t) + gamma V(t + 1) - V(t).
    The sums double in length in each round, so that there are log2(L) of them.
    """
    after = torch.nn.functional.pad(values[:, 1:], (0, 1))
    sums = rewards + gamma * after - values
    factor, length = gamma * lam, 1
    while length < sums.shape[1]:
        sums = sums + factor * torch.nn.functional.pad(sums[:, length:], (0, length))
        factor, length = factor * factor, 2 * length
    return sums


def token_advantages(
    rewards: Tensor,
    values: Tensor,
    token_mask: Tensor,
    episode_of: Tensor,
    *,
    gamma: float,
    lam: float,
    penalty: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the advantages and the returns of sampled tokens, `[R, T]` of the dtype of `values`, 0 elsewhere.

    The sampled tokens of an episode, in the order of its rows, are its time steps: what lies between them takes no
    time. The last one has the reward of the episode, and the value after it is 0, also if the completion was truncated.

    `rewards [E]`; `values [R, T]`: the critic's value before each token; `token_mask [R, T]`; `episode_of [R]` int64,
    ascending; `penalty [R, T]`: what is subtracted from the reward of each token. Computed in fp64.
    """
    row, column = token_mask.nonzero(as_tuple=True)  # by rows, so an episode's tokens are in order
    episode = episode_of[row]
    counts = torch.bincount(episode, minlength=len(rewards))
    place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[episode]
    shape = (len(rewards), int(counts.max()))

    def by_episode(tokens: Tensor) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64).index_put_((episode, place), tokens[row, column].double())

    value = by_episode(values)
    reward = torch.zeros_like(value) if penalty is None else -by_episode(penalty)
    ends = counts.nonzero()[:, 0]  # an episode may have no sampled token
    reward[ends, counts[ends] - 1] += rewards[ends].double()
    advantages = generalized_advantages(reward, value, gamma, lam)

    def by_row(tokens: Tensor) -> Tensor:
        return torch.zeros_like(values).index_put_((row, column), tokens[episode, place].to(values.dtype))

    return by_row(advantages), by_row(advantages + value)
