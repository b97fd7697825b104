"""Groups of rollouts by the spread of their rewards: those without any are sampled again, small ones are noticed.

Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11) repeats rollouts until enough groups have a gradient. Where groups
differ by a small part of the reward alone, advantages enlarge it to their usual size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.policy.microbatching import average_metrics
from rlframework.rollout.result import Rollout


def sample_groups(
    play: Callable[[int], Rollout], *, groups: int, samples_per_prompt: int, rounds: int, pad_id: int
) -> Rollout:
    """Return `groups` groups of the rollouts `play(0)`, `play(1)`, ..., of `groups` groups each.

    Rollouts are played until there are enough groups whose rewards differ, and at most `rounds` (0 is 1, all groups of
    which are kept). Groups whose rewards are equal fill up what is missing then. `metrics` are means over all rollouts,
    with `sampling_rounds` and `sampled_groups_kept`, the fraction of groups whose rewards differ.
    """
    played = [play(0)]
    if not rounds:
        return played[0]
    found = [differing_groups(played[0], samples_per_prompt)]
    while int(torch.cat(found).sum()) < groups and len(played) < rounds:
        played.append(play(len(played)))
        found.append(differing_groups(played[-1], samples_per_prompt))
    differs = torch.cat(found)
    chosen = torch.cat((differs.nonzero()[:, 0], (~differs).nonzero()[:, 0]))[:groups]
    result = join(played, pad_id)
    episodes = (chosen[:, None] * samples_per_prompt + torch.arange(samples_per_prompt)).flatten()
    result = result if len(played) == 1 and bool(differs.all()) else select(result, episodes)
    result.metrics |= {"sampling_rounds": float(len(played)), "sampled_groups_kept": float(differs.float().mean())}
    return result


def differing_groups(result: Rollout, samples_per_prompt: int) -> Tensor:
    """Return `[G]` bool: whether the rewards of a group's samples, without those that failed, are not all equal."""
    rewards, kept = result.rewards.view(-1, samples_per_prompt), ~result.failed.view(-1, samples_per_prompt)
    infinity = torch.full_like(rewards, torch.inf)
    largest = rewards.where(kept, -infinity).amax(1)
    return largest > rewards.where(kept, infinity).amin(1)


def join(rollouts: Sequence[Rollout], pad_id: int) -> Rollout:
    """Return one rollout of the episodes of all, in order; `metrics` are the means of theirs."""
    if len(rollouts) == 1:
        return rollouts[0]
    starts = torch.tensor([0, *(len(part.samples) for part in rollouts)]).cumsum(0)
    return Rollout(
        [sample for part in rollouts for sample in part.samples],
        [text for part in rollouts for text in part.completions],
        BatchedDataDict.from_batches([part.data for part in rollouts], {"input_ids": pad_id}),
        torch.cat([part.rewards for part in rollouts]),
        torch.cat([part.accuracies for part in rollouts]),
        torch.cat([part.completion_lengths for part in rollouts]),
        torch.cat([part.truncated for part in rollouts]),
        average_metrics([part.metrics for part in rollouts]),
        torch.cat([part.episode_of + start for part, start in zip(rollouts, starts, strict=False)]),
        torch.cat([part.failed for part in rollouts]),
        [turns for part in rollouts for turns in part.transcripts],
        [reason for part in rollouts for reason in part.failures],
        parts=[each for part in rollouts for each in part.parts],
    )


def select(result: Rollout, episodes: Tensor) -> Rollout:
    """Return the rollout of `episodes [E']`, indices into those of `result`, in their order; `metrics` stay."""
    place = torch.full((len(result.samples),), -1)
    place[episodes] = torch.arange(len(episodes))
    place_of_row = place[result.episode_of]
    rows = place_of_row.argsort(stable=True)[int((place_of_row < 0).sum()) :]
    chosen = episodes.tolist()
    return Rollout(
        [result.samples[index] for index in chosen],
        [result.completions[index] for index in chosen],
        result.data.select_indices(rows),
        result.rewards[episodes],
        result.accuracies[episodes],
        result.completion_lengths[episodes],
        result.truncated[episodes],
        result.metrics,
        place_of_row[rows],
        result.failed[episodes],
        [result.transcripts[index] for index in chosen] if result.transcripts else (),
        [result.failures[index] for index in chosen] if result.failures else (),
        parts=[result.parts[index] for index in chosen] if result.parts else (),
    )


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
