"""The mixture of completions that the student generates with those of the data."""

from __future__ import annotations

from math import floor

import numpy as np

from rlframework.config.distillation_algorithms import DistillationConfig


def student_rows(config: DistillationConfig, batch_size: int, seed: int, step: int) -> int:
    """Return how many rows of the batch of `step`, counted from 1, the student generates; the first ones.

    It depends on nothing else, so that a resumed run goes on with the same mixture. Over steps, `rows` has the fraction
    of all rows, less than one row off.
    """
    if config.mixing == "batches":
        return batch_size if np.random.default_rng([seed, step, 1]).random() < config.student_fraction else 0
    share = config.student_fraction * batch_size
    return floor(share * step + 1e-6) - floor(share * (step - 1) + 1e-6)  # so that 0.1 * 10 * 3 is 3
