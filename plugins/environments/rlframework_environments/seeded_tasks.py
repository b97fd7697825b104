"""Tasks that are numbers: distinct seeds for training and validation, drawn from the run's seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from rlframework.interfaces.environment import Sample, Split


class SeededTasks:
    """Samples that `make` creates from distinct numbers below 2**31, which `seed` determines.

    The validation numbers are drawn first, so that they do not change with the number of training samples.
    """

    def __init__(self, train: int, validation: int, seed: int, make: Callable[[int], Sample]) -> None:
        numbers = random.Random(f"tasks-{seed}").sample(range(2**31), validation + train)
        self._samples: dict[Split, list[Sample]] = {
            "validation": list(map(make, numbers[:validation])),
            "train": list(map(make, numbers[validation:])),
        }

    def of(self, split: Split) -> Sequence[Sample]:
        """Return the samples of a split."""
        return self._samples[split]
