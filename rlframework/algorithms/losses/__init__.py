"""Losses on log-probabilities, scores and values: see `rlframework.interfaces.loss.LossFunction`."""

# ruff: noqa: F401 - the names are exported
# mypy: implicit-reexport
from __future__ import annotations

from typing import TYPE_CHECKING

from rlframework.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from rlframework.algorithms.losses.clipped_pg import ClippedPGLoss
    from rlframework.algorithms.losses.distillation import DistillationLoss
    from rlframework.algorithms.losses.targets import NLLLoss, ValueLoss
    from rlframework.algorithms.losses.terms import loss_mask, mismatch_metrics, token_mean

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
