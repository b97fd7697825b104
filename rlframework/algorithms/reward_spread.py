"""Notices that groups differ by a small part of the reward alone, which advantages enlarge to their usual size."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from rlframework.rollout.result import Rollout

_LOG = logging.getLogger(__name__)

SMALL = 0.1
"""Largest spread of a group's rewards that is small, as a fraction of the range of all rewards of the run so far."""

SAME = 0.9
"""Smallest correlation with the reward, within groups, of a part that is named."""


class RewardSpread:
    """Warns, once, of a step in which most groups have rewards that differ, but by little, and are not near the best.

    The range of rewards is that of the steps so far. Where advantages are divided by a deviation, such groups teach as
    strongly as any: a small penalty is learned at the cost of the task.
    """

    def __init__(self, samples_per_prompt: int) -> None:
        self._each, self._warned = samples_per_prompt, False
        self._lowest, self._highest = float("inf"), float("-inf")

    def note(self, step: int, result: Rollout) -> None:
        """Take the rewards of `step` into account."""
        if not bool((kept := ~result.failed).any()):
            return
        self._lowest = min(self._lowest, float(result.rewards[kept].min()))
        self._highest = max(self._highest, float(result.rewards[kept].max()))
        small, spread = self._small_groups(result)
        if self._warned or 2 * int(small.sum()) <= len(small):
            return
        self._warned = True
        _LOG.warning(
            "step %d: in %d of %d groups the rewards differ by at most %.3g, although this run has had rewards from "
            "%.3g to %.3g. %s. Advantages divide by the deviation, so this small difference is learned as if it were "
            "the task: a model may learn to avoid a penalty by giving up. If this goes on (metric train/reward_std), "
            "give that part only where the task is solved, reward partial success, or turn off what divides "
            "(algorithm.normalize_std, algorithm.batch_normalization)",
            step,
            int(small.sum()),
            len(small),
            spread,
            self._lowest,
            self._highest,
            self._remaining(result, small),
        )

    def _small_groups(self, result: Rollout) -> tuple[Tensor, float]:
        """Return `[P]` bool: the groups with small differences far from the best reward; and their largest spread."""
        rewards, kept = result.rewards.view(-1, self._each), ~result.failed.view(-1, self._each)
        infinity = torch.full_like(rewards, torch.inf)
        best, worst = rewards.where(kept, -infinity).amax(1), rewards.where(kept, infinity).amin(1)
        spread, bound = best - worst, SMALL * (self._highest - self._lowest)
        small = (spread > 0) & (spread <= bound) & (best < self._highest - bound)
        return small, float(spread[small].max()) if bool(small.any()) else 0.0

    def _remaining(self, result: Rollout, small: Tensor) -> str:
        """Return what the rewards of the `small` groups follow, as a sentence without its full stop."""
        counted = (small[:, None] & ~result.failed.view(-1, self._each)).double()
        rewards = _centred(result.rewards, counted)
        best, closest = "", SAME
        for name, values in _parts(result):
            found = _centred(values, counted)
            scale = float(found.norm() * rewards.norm())
            correlation = abs(float((found * rewards).sum())) / scale if scale else 0.0
            if correlation > closest + 1e-6:  # of equal ones the first
                best, closest = name, correlation
        return f"What remains of the reward there is {best}" if best else "No single part of the reward remains there"


def _parts(result: Rollout) -> Iterator[tuple[str, Tensor]]:
    """Yield what a reward may consist of, by name, with a value for each episode: its parts, then penalties."""
    for name in dict.fromkeys(name for parts in result.parts for name in parts):
        yield f"its part `{name}`", torch.tensor([parts.get(name, 0.0) for parts in result.parts])
    if result.transcripts:
        turns = [sum(bool(turn["trained"]) for turn in transcript) for transcript in result.transcripts]
        yield "what follows the number of turns", torch.tensor(turns)
    yield "what follows the number of sampled tokens", result.completion_lengths


def _centred(values: Tensor, counted: Tensor) -> Tensor:
    """Return `values [B]` as `[P, N]` minus the mean of their group; 0 where `counted [P, N]` is 0."""
    grouped = values.double().view(counted.shape)
    means = (grouped * counted).sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1.0)
    return (grouped - means) * counted
