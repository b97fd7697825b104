"""Rows of episodes as optimizer steps: each step takes whole episodes, whatever their number of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor


def optimizer_steps(
    data: BatchedDataDict[Any], episode_of: Tensor, *, episodes: int, ranks: int, level: str
) -> tuple[BatchedDataDict[Any], int]:
    """Return `data` with the same number of rows for each optimizer step, and that number.

    `episode_of [R]`: the episode of each row, ascending from 0. A step has the rows of the next `episodes` episodes,
    and dummy rows of one token, with `sample_mask` 0, up to the number of rows of the largest step and to a multiple of
    `ranks`. `level`: that of the loss; for a mean over sequences, an episode with several rows counts as one sequence:
    `sequence_weights [R]` fp32 are added. Data with a row for each episode are returned as they are.
    """
    step_of = torch.div(episode_of, episodes, rounding_mode="floor")
    counts = torch.bincount(step_of)
    if len(episode_of) == int(episode_of[-1]) + 1:  # a row for each episode
        return data, episodes
    if level != "token":
        data["sequence_weights"] = sequence_weights(data, episode_of, step_of, level)
    rows = -(-int(counts.max()) // ranks) * ranks
    spare = rows * len(counts) - len(episode_of)
    padded = BatchedDataDict.from_batches([data, _dummies(data, spare)]) if spare else data
    order = torch.full((len(counts), rows), -1)
    starts = counts.cumsum(0) - counts
    places = torch.arange(len(episode_of)) - starts[step_of]
    order[step_of, places] = torch.arange(len(episode_of))
    order = order.flatten()
    order[order < 0] = torch.arange(len(episode_of), len(episode_of) + spare)
    return padded.select_indices(order), rows


def sequence_weights(data: BatchedDataDict[Any], episode_of: Tensor, step_of: Tensor, level: str) -> Tensor:
    """Return `[R]` fp32 weights with which a mean over a step's rows is a mean over its episodes.

    A mean over rows is divided by their number, so each weight has the factor rows / episodes, counting those with
    `sample_mask` 1 in the step. With `level` "sequence", a row has a mean over its tokens, whose weight in that of the
    episode is its share of the tokens; with "constant", it has a sum, and the sums of an episode add up.
    """
    valid = data["sample_mask"] != 0
    episodes = int(episode_of[-1]) + 1
    counted = torch.zeros(episodes, dtype=torch.bool).index_put_((episode_of[valid],), torch.tensor(True))
    steps = int(step_of[-1]) + 1
    rows = torch.bincount(step_of[valid], minlength=steps).float()
    first = torch.searchsorted(episode_of, torch.arange(episodes))
    of_step = torch.bincount(step_of[first][counted], minlength=steps).float()
    weights: Tensor = (rows / of_step.clamp(min=1.0))[step_of]
    if level == "constant":
        return weights
    tokens = data["token_mask"][:, 1:].sum(1) * valid
    total = torch.zeros(episodes).index_add_(0, episode_of, tokens)
    shares: Tensor = tokens / total.clamp(min=1.0)[episode_of]
    return weights * shares


def _dummies(data: BatchedDataDict[Any], count: int) -> BatchedDataDict[Any]:
    """Return `count` rows of one token, without media, that are not counted."""
    dummies = data.select_indices(torch.zeros(count, dtype=torch.int64))
    for key, value in dummies.items():
        if isinstance(value, PackedTensor):
            dummies[key] = PackedTensor.empty_like(value)
        elif key not in ("input_ids", "input_lengths"):
            dummies[key] = torch.zeros_like(value)
    last = int(data["input_lengths"][0]) - 1
    dummies["input_ids"][:, 0] = data["input_ids"][0, last]  # the first token may stand for an image
    dummies["input_lengths"] = torch.ones_like(dummies["input_lengths"])
    return dummies
