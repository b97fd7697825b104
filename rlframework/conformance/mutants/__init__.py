"""Mutants: parts that are broken on purpose, from the bugs that this field really has.

They prove the suites: each names the tests that must fail on it, and each suite test is named by at least one. A mutant
counts only where the test fails with a `ConformanceFailure`, so one that dies in set-up proves nothing.
"""

from __future__ import annotations

from importlib import import_module

from rlframework.conformance.mutants.mutant import Mutant

__all__ = ["Mutant", "find_mutant", "mutants_of"]


def mutants_of(kind: str) -> dict[str, Mutant]:
    """The mutants of a kind of part, by name."""
    found: tuple[Mutant, ...] = import_module(f"{__name__}.{kind}").MUTANTS
    named = {mutant.name: mutant for mutant in found}
    if len(named) != len(found):
        raise ValueError(f"two mutants of {kind} have one name")
    return named


def find_mutant(kind: str, name: str) -> Mutant:
    """The mutant of `kind` that is called `name`."""
    return mutants_of(kind)[name]
