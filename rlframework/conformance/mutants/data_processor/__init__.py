"""Broken data processors: each changes the input or the output of the sound one."""

from __future__ import annotations

from rlframework.conformance.mutants.data_processor import contents, counts, grouping
from rlframework.conformance.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (*counts.MUTANTS, *grouping.MUTANTS, *contents.MUTANTS)
