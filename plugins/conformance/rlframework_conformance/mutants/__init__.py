"""Mutants: deliberately broken parts, each with one bug that occurs in real training stacks.

They prove that the suites work: each mutant names the tests that must fail on it, and at least one mutant names each
test. A test must fail with a `ConformanceFailure`, so a mutant that crashes in set-up proves nothing. Importing this
package imports none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from rlframework_conformance.mutants.mutant import Mutant

__all__ = ["MODULES", "Mutant", "find_mutant", "mutants_of"]

MODULES: Mapping[str, tuple[str, ...]] = {
    "policy_worker": (
        "policy_worker.conventions",
        "policy_worker.wrong_grouping",
        "policy_worker.kinds",
        "policy_worker.parallelism",
        "policy_worker.training",
        "policy_worker.wrong_scores",
        "policy_worker.wrong_state",
        "policy_worker.saving",
        "policy_worker.wrong_checkpoints",
        "policy_worker.wrong_adapters",
    ),
    "data_processor": ("data_processor.wrong_grouping", "data_processor.contents"),
    "worker_group": ("worker_group.calls", "worker_group.lifecycle"),
    "generation_engine": (
        "generation_engine.samples",
        "generation_engine.wrong_results",
        "generation_engine.wrong_requests",
        "generation_engine.wrong_weights",
        "generation_engine.updates",
    ),
    "environment": ("wrong_environment", "wrong_episodes"),
}
"""Kind of part to the modules of its mutants."""


def mutants_of(kind: str) -> dict[str, Mutant]:
    """Return the mutants of a kind of part by name, in the order of their modules.

    Raises ValueError if two share a name.
    """
    found = [mutant for module in MODULES[kind] for mutant in _mutants_in(module)]
    named = {mutant.name: mutant for mutant in found}
    if len(named) != len(found):
        raise ValueError(f"two mutants of {kind} have the same name")
    return named


def find_mutant(kind: str, name: str) -> Mutant:
    """Return the mutant `name` of a kind of part, importing only its module; raises KeyError if it does not exist.

    A module is imported if its source contains the name in quotes.
    """
    for module in MODULES[kind]:
        source = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        if f'"{name}"' in source:
            for mutant in _mutants_in(module):
                if mutant.name == name:
                    return mutant
    raise KeyError(name)


def _mutants_in(module: str) -> Iterator[Mutant]:
    """Yield the values of a module, and of its table `MUTANTS` if it has one, that are mutants."""
    values = vars(import_module(f"{__name__}.{module}"))
    yield from (value for value in (*values.values(), *values.get("MUTANTS", ())) if isinstance(value, Mutant))
