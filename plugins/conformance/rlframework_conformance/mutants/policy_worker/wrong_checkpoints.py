"""Violations of contract 5: training does not resume from the same state, in any form of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlframework.base.errors import DataError, WriteError
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.policy.checkpoint_io import CheckpointIO
from rlframework.policy.engine import Engine
from rlframework.policy.scoring import SnapshotReference
from rlframework.policy.trained_weights import TrainedWeights
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import after, around, in_silence, mutant, result, together
from rlframework_conformance.mutants.policy_worker.engine_access import change_weights, copy_of, to_bfloat16


@mutant("checkpoint_without_steps", "The optimizer's bias correction restarts after resuming.")
@around(Engine.load_moments)
def _without_steps(call: Any, engine: Any, moments: Any) -> None:
    call({name: replace(moments[name], steps=0) for name in moments})


@mutant("rank_zero_loads", "Only rank 0 loads the weights.", layout=Layout(data=2))
@around(TrainedWeights.read)
def _rank_zero_loads(call: Any, weights: Any, path: str) -> None:
    if weights.engine.context.rank == 0:
        call(path)


@mutant("weights_only", "Resuming loads the weights but no optimizer state.")
@around(PolicyWorker.load_checkpoint)
def _weights_only(call: Any, worker: Any, weights_path: str, optimizer_path: str | None = None) -> None:
    call(weights_path)


@mutant(
    "checkpoint_without_moved_reference", "A reference that moved starts from the first model again after resuming."
)
@around(PolicyWorker.load_checkpoint)
def _without_moved_reference(
    call: Any, worker: Any, weights_path: str, optimizer_path: Any = None, reference_path: Any = None
) -> None:
    call(weights_path, optimizer_path)


@mutant("pieces_without_second_moments", "The shards of the second moments are saved as zeros.")
@around(Engine.sharded_state)
def _pieces_without_second_moments(call: Any, engine: Any) -> Any:
    state = call()
    for index, shard in enumerate(state.moments):
        if shard.name.startswith("exp_avg_sq."):
            state.moments[index] = replace(shard, local=torch.zeros_like(shard.local))
    return state


@mutant("pieces_without_steps", "The shards are saved with an optimizer step count of 0.")
@around(Engine.sharded_state)
def _pieces_without_steps(call: Any, engine: Any) -> Any:
    state = call()
    return replace(state, steps=dict.fromkeys(state.steps, 0))


@mutant("pieces_elsewhere", "The shards are saved with each other's offsets.", layout=Layout(data=2))
@around(Engine.sharded_state)
def _elsewhere(call: Any, engine: Any) -> Any:
    """The two halves of each weight have each other's offsets, so the shards still cover it."""
    state = call()
    for index, shard in enumerate(state.weights):
        if shard.shape and 2 * shard.local.shape[0] == shard.shape[0]:
            first = 0 if shard.offset[0] else shard.local.shape[0]
            state.weights[index] = replace(shard, offset=(first, *shard.offset[1:]))
    return state


@around(PolicyWorker.save_checkpoint)
def _save_later(call: Any, worker: Any, *args: Any, asynchronous: bool = False, **options: Any) -> None:
    if asynchronous:
        worker.later = options["weights_path"], options["optimizer_path"]
    else:
        call(*args, **options)


@around(PolicyWorker.finish_checkpoint)
def _save_now(call: Any, worker: Any) -> None:
    if paths := vars(worker).pop("later", None):
        worker.save_checkpoint(*paths, form="sharded")
    call()


@mutant("moments_of_one_layout", "Resuming with another number of workers drops the optimizer state.")
@around(PolicyWorker.load_checkpoint)
def _moments_of_one_layout(call: Any, worker: Any, weights_path: str, optimizer_path: str | None = None) -> None:
    from safetensors.torch import load_file

    if optimizer_path is not None:
        states = load_file(Path(optimizer_path) / "random.safetensors")
        if sum(name.startswith("cpu.") for name in states) != worker.engine.context.world_size:
            optimizer_path = None
    call(weights_path, optimizer_path)


_unchecked = around(CheckpointIO.check)(lambda call, checkpoints, *folders: None)


@mutant("native_without_optimizer", "The optimizer state in native files is not loaded.")
@around(Engine.load_native)
def _native_without_optimizer(call: Any, engine: Any, folder: Path, *, optimizer: bool) -> None:
    fresh = {name: copy_of(moments) for name, moments in engine.gather_moments()} if optimizer else {}
    call(folder, optimizer=optimizer)
    if optimizer:
        engine.load_moments(fresh)


@mutant("native_stays_as_built", "Loading only the weights from native files has no effect.")
@around(Engine.load_native)
def _native_stays_as_built(call: Any, engine: Any, folder: Path, *, optimizer: bool) -> None:
    before = engine.snapshot()
    call(folder, optimizer=optimizer)
    if not optimizer:
        engine.restore(before)


MUTANTS = (
    mutant("moments_in_bfloat16", "The first moments are saved in bfloat16.")(
        result(
            Engine.gather_moments,
            lambda moments: ((name, replace(each, exp_avg=to_bfloat16(each.exp_avg))) for name, each in moments),
        )
    ),
    mutant("checkpoint_rounds_weights", "Saving a checkpoint rounds the live weights to bfloat16.")(
        after(PolicyWorker.save_checkpoint, lambda worker: change_weights(worker.engine, to_bfloat16))
    ),
    mutant("reference_from_the_checkpoint", "The reference model is loaded from the checkpoint.")(
        after(
            PolicyWorker.load_checkpoint,
            lambda worker: setattr(worker.scoring, "reference", SnapshotReference(worker.engine)),
        )
    ),
    mutant("damage_borne", "A checkpoint that cannot be read is silently skipped.")(
        in_silence(PolicyWorker.load_checkpoint, DataError)
    ),
    mutant("failed_save_is_silent", "A failed checkpoint save raises no error.")(
        in_silence(PolicyWorker.save_checkpoint, WriteError)
    ),
    mutant("checkpoint_without_schedule", "The learning-rate schedule restarts after resuming.")(
        after(PolicyWorker.load_checkpoint, lambda worker: setattr(worker.progress, "train_calls", 0))
    ),
    mutant("checkpoint_without_skips", "The count of consecutive skipped steps restarts at 0 after resuming.")(
        after(PolicyWorker.load_checkpoint, lambda worker: setattr(worker.progress, "skipped_in_a_row", 0))
    ),
    mutant("checkpoint_without_random_state", "Workers draw different random numbers after resuming.")(
        after(PolicyWorker.load_checkpoint, lambda worker: torch.manual_seed(99))
    ),
    mutant("checkpoint_without_second_moments", "The second moments are not saved.")(
        result(
            Engine.gather_moments,
            lambda moments: (
                (name, replace(each, exp_avg_sq=torch.zeros_like(each.exp_avg_sq))) for name, each in moments
            ),
        )
    ),
    mutant("asynchronous_is_later", "An asynchronous save writes the state at the time it finishes, not at the call.")(
        together(_save_later, _save_now)
    ),
    mutant("without_checksums", "The checksums of a checkpoint, in any form, are not verified.")(_unchecked),
)
