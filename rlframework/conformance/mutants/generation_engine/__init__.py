"""Broken generation engines: each changes the input or the output of the sound one.

Mutants know the attached module or the loaded weights, and nothing else of the sound engine.
"""

from __future__ import annotations

from rlframework.conformance.mutants.generation_engine import layout, refit, samples, scores, weights
from rlframework.conformance.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (*scores.MUTANTS, *samples.MUTANTS, *layout.MUTANTS, *weights.MUTANTS, *refit.MUTANTS)
