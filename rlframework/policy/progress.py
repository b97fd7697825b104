"""`TrainingProgress`: the counters of a worker that its services share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TrainingProgress:
    """How far a worker has trained.

    `train_calls`: calls of `train`, which the learning-rate schedule counts. `skipped_in_a_row`: consecutive steps
    skipped for a non-finite gradient. `weights_version`: changes of the weights, by a step or by loading.
    """

    train_calls: int = 0
    skipped_in_a_row: int = 0
    weights_version: int = 0
