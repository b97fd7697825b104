"""Violations of contract 5: training does not resume from the same state."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from rlframework.base.errors import DataError
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.policy.engine import Engine
from rlframework.policy.scoring import SnapshotReference
from rlframework.policy.trained_weights import TrainedWeights
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import around, mutant
from rlframework_conformance.mutants.policy_worker.engine_access import change_weights, to_bfloat16


@mutant("checkpoint_without_schedule", "The learning-rate schedule restarts after resuming.")
@around(PolicyWorker.load_checkpoint)
def _without_schedule(call: Any, worker: Any, *args: Any, **options: Any) -> None:
    call(*args, **options)
    worker.progress.train_calls = 0


@mutant("checkpoint_without_skips", "The count of consecutive skipped steps restarts at 0 after resuming.")
@around(PolicyWorker.load_checkpoint)
def _without_skips(call: Any, worker: Any, *args: Any, **options: Any) -> None:
    call(*args, **options)
    worker.progress.skipped_in_a_row = 0


@mutant("checkpoint_without_random_state", "Workers draw different random numbers after resuming.")
@around(PolicyWorker.load_checkpoint)
def _without_random_state(call: Any, worker: Any, *args: Any, **options: Any) -> None:
    call(*args, **options)
    torch.manual_seed(99)


@mutant("checkpoint_without_second_moments", "The second moments are not saved.")
@around(Engine.gather_moments)
def _without_second_moments(call: Any, engine: Any) -> Any:
    return ((name, replace(each, exp_avg_sq=torch.zeros_like(each.exp_avg_sq))) for name, each in call())


@mutant("checkpoint_without_steps", "The optimizer's bias correction restarts after resuming.")
@around(Engine.load_moments)
def _without_steps(call: Any, engine: Any, moments: Any) -> None:
    call({name: replace(moments[name], steps=0) for name in moments})


@mutant("moments_in_bfloat16", "The first moments are saved in bfloat16.")
@around(Engine.gather_moments)
def _moments_in_bfloat16(call: Any, engine: Any) -> Any:
    return ((name, replace(each, exp_avg=to_bfloat16(each.exp_avg))) for name, each in call())


@mutant("rank_zero_loads", "Only rank 0 loads the weights.", layout=Layout(data=2))
@around(TrainedWeights.read)
def _rank_zero_loads(call: Any, weights: Any, path: str) -> None:
    if weights.engine.context.rank == 0:
        call(path)


@mutant("weights_only", "Resuming loads the weights but no optimizer state.")
@around(PolicyWorker.load_checkpoint)
def _weights_only(call: Any, worker: Any, weights_path: str, optimizer_path: str | None = None) -> None:
    call(weights_path)


@mutant("checkpoint_rounds_weights", "Saving a checkpoint rounds the live weights to bfloat16.")
@around(PolicyWorker.save_checkpoint)
def _checkpoint_rounds_weights(call: Any, worker: Any, *args: Any, **options: Any) -> None:
    call(*args, **options)
    change_weights(worker.engine, to_bfloat16)


@mutant("reference_from_the_checkpoint", "The reference model is loaded from the checkpoint.")
@around(PolicyWorker.load_checkpoint)
def _reference_from_the_checkpoint(call: Any, worker: Any, *args: Any, **options: Any) -> None:
    call(*args, **options)
    worker.scoring.reference = SnapshotReference(worker.engine)


@mutant(
    "checkpoint_without_moved_reference", "A reference that moved starts from the first model again after resuming."
)
@around(PolicyWorker.load_checkpoint)
def _without_moved_reference(
    call: Any, worker: Any, weights_path: str, optimizer_path: Any = None, reference_path: Any = None
) -> None:
    call(weights_path, optimizer_path)


@mutant("damage_borne", "A checkpoint that cannot be read is silently skipped.")
@around(PolicyWorker.load_checkpoint)
def _damage_borne(call: Any, worker: Any, *args: Any, **options: Any) -> None:
    with suppress(DataError):
        call(*args, **options)
