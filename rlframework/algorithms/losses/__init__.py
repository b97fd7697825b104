"""Losses on log-probabilities, scores and values: see `rlframework.interfaces.loss.LossFunction`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlframework.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from rlframework.algorithms.losses.averages import loss_mask, token_mean
    from rlframework.algorithms.losses.clipped_pg import ClippedPGLoss
    from rlframework.algorithms.losses.distillation import DistillationLoss
    from rlframework.algorithms.losses.mismatch import mismatch_metrics
    from rlframework.algorithms.losses.nll import NLLLoss
    from rlframework.algorithms.losses.preference import KTOLoss, PairLoss
    from rlframework.algorithms.losses.reward_model import BradleyTerryLoss, StepLoss
    from rlframework.algorithms.losses.value import ValueLoss

__all__ = [
    "BradleyTerryLoss",
    "ClippedPGLoss",
    "DistillationLoss",
    "KTOLoss",
    "NLLLoss",
    "PairLoss",
    "StepLoss",
    "ValueLoss",
    "loss_mask",
    "mismatch_metrics",
    "token_mean",
]

_MODULES = {
    "BradleyTerryLoss": "rlframework.algorithms.losses.reward_model",
    "ClippedPGLoss": "rlframework.algorithms.losses.clipped_pg",
    "DistillationLoss": "rlframework.algorithms.losses.distillation",
    "KTOLoss": "rlframework.algorithms.losses.preference",
    "NLLLoss": "rlframework.algorithms.losses.nll",
    "PairLoss": "rlframework.algorithms.losses.preference",
    "StepLoss": "rlframework.algorithms.losses.reward_model",
    "ValueLoss": "rlframework.algorithms.losses.value",
    "loss_mask": "rlframework.algorithms.losses.averages",
    "mismatch_metrics": "rlframework.algorithms.losses.mismatch",
    "token_mean": "rlframework.algorithms.losses.averages",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
