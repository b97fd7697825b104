"""Losses on log-probabilities, scores and values: see `rlframework.interfaces.loss.LossFunction`."""

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
    "mismatch_metrics",
]
