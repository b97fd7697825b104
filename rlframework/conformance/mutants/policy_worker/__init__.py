"""Broken training engines: subclasses of any worker that derives from `PolicyWorkerBase`, one module per contract."""

from __future__ import annotations

from rlframework.conformance.mutants.mutant import Mutant
from rlframework.conformance.mutants.policy_worker import (
    adapters,
    checkpoints,
    context,
    conventions,
    experts,
    failures,
    grouping,
    memory,
    native,
    refit,
    saving,
    scores,
    sharded,
    state,
    tensor,
    training,
)

MUTANTS: tuple[Mutant, ...] = tuple(
    value
    for module in (
        conventions,
        grouping,
        context,
        tensor,
        training,
        experts,
        scores,
        state,
        memory,
        saving,
        refit,
        checkpoints,
        adapters,
        sharded,
        native,
        failures,
    )
    for value in vars(module).values()
    if isinstance(value, Mutant)
)
"""All policy-worker mutants."""
