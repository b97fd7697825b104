"""Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11): rollouts are repeated until enough groups have a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
