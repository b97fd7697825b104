"""Generalized advantage estimation (arXiv:1506.02438) over the sampled tokens of episodes."""

from __future__ import annotations

import torch
from torch import Tensor


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
