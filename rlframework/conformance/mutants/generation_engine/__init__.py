"""Broken generation engines: each changes what the sound one is given, or what it gives back.

A mutant remembers the module that was attached or the weights that were loaded, and nothing else of the sound engine.
"""

from __future__ import annotations

from rlframework.conformance.mutants.generation_engine import layout, refit, samples, scores, weights
from rlframework.conformance.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (*scores.MUTANTS, *samples.MUTANTS, *layout.MUTANTS, *weights.MUTANTS, *refit.MUTANTS)
