"""Mutants: deliberately broken parts, each with one bug that occurs in real training stacks.

They prove that the suites work: each mutant names the tests that must fail on it, and at least one mutant names each
test. A test must fail with a `ConformanceFailure`, so a mutant that crashes in set-up proves nothing.
"""

from __future__ import annotations

from importlib import import_module

from rlframework.conformance.mutants.mutant import Mutant

__all__ = ["Mutant", "find_mutant", "mutants_of"]


def mutants_of(kind: str) -> dict[str, Mutant]:
    """Return the mutants of a kind of part by name; raises ValueError if two share a name."""
    found: tuple[Mutant, ...] = import_module(f"{__name__}.{kind}").MUTANTS
    named = {mutant.name: mutant for mutant in found}
    if len(named) != len(found):
        raise ValueError(f"two mutants of {kind} have the same name")
    return named


def find_mutant(kind: str, name: str) -> Mutant:
    """Return the mutant `name` of a kind of part; raises KeyError if it does not exist."""
    return mutants_of(kind)[name]
