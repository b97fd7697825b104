"""Seeds of rollouts: of rows, of the turns of an episode, and of episodes' environments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from rlframework.interfaces.environment import Sample


def row_seeds(seed: int, step: int, rows: int) -> Tensor:
    """Return `[rows]` int64 seeds that differ for each row and step, and do not depend on the number of workers."""
    # not torch's generator, which on the CPU uses only the lower 32 bits of its seed
    return torch.from_numpy(np.random.default_rng([seed, step]).integers(0, 2**62, rows))


def ticket_seeds(seed: int, step: int, slot: int, rows: int, groups: int) -> list[int]:
    """Return the seeds of the `rows` rows of place `slot` in `step`: part of those that `row_seeds` draws for the step.

    The seeds of a step are drawn together for `groups` places, and again for twice as many if the step was extended.
    """
    places = groups * -(-(slot + 1) // groups)
    return _step_seeds(seed, step, places * rows)[slot * rows : (slot + 1) * rows].tolist()


@lru_cache(maxsize=32)
def _step_seeds(seed: int, step: int, rows: int) -> Tensor:
    return row_seeds(seed, step, rows)


def prompt_seeds(seed: int, first: int, prompts: int, each: int) -> Tensor:
    """Return `[prompts * each]` int64 seeds for `each` rows of the prompts numbered from `first`.

    They do not depend on the number of prompts, nor on how these are batched.
    """
    return torch.cat([row_seeds(seed, number, each) for number in range(first, first + prompts)])


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn, counted from 0, of an episode with `seed`; that of the first turn is `seed` itself."""
    if turn == 0:
        return seed
    return int(np.random.SeedSequence([seed, turn]).generate_state(1, np.uint64)[0] >> 2)


def task_seeds(samples: Sequence[Sample], seeds: Sequence[int]) -> list[int]:
    """Return a seed for the environment of each episode, the same for adjacent attempts at one of `samples`.

    So attempts that are compared with each other begin with the same task, and differ by the model's turns alone.
    """
    found: list[int] = []
    for number, sample in enumerate(samples):
        again = number > 0 and samples[number - 1] is sample
        found.append(found[-1] if again else turn_seed(seeds[number], _OF_TASKS))
    return found


_OF_TASKS = 2**32
"""In place of the number of a turn, which is smaller."""
