"""Advantages computed from the rewards of a group of completions of one prompt."""

from __future__ import annotations

import torch
from torch import Tensor


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
    count = groups.shape[1]
    total = groups.sum(1, keepdim=True)
    baseline = (total - groups) / (count - 1) if leave_one_out else total / count
    advantages = groups - baseline
    if normalize_std:
        advantages = advantages / (groups.std(1, keepdim=True) + eps)
    constant = (groups == groups[:, :1]).all(1, keepdim=True).expand_as(groups)
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
