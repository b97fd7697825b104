"""Broken data processors: each changes what goes into the sound one, or what comes out of it."""

from __future__ import annotations

from rlframework.conformance.mutants.data_processor import contents, counts, grouping
from rlframework.conformance.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (*counts.MUTANTS, *grouping.MUTANTS, *contents.MUTANTS)
