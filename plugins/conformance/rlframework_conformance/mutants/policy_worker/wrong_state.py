"""Silent failures, and operations that change state: violations of contracts 2 (offloading), 4, 7 and 8."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from rlframework.base.errors import UserError
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.policy.engine import Engine
from rlframework.policy.scoring import SnapshotReference
from rlframework.policy.training_step import Training
from rlframework_conformance.measure import MutantNotApplicable
from rlframework_conformance.mutants.mutant import after, around, before, mutant, together
from rlframework_conformance.mutants.policy_worker.engine_access import change_weights, optimizer_of, to_bfloat16


@mutant("evaluation_steps", "An evaluation takes an optimizer step.")
@around(PolicyWorker.train)
def _evaluation_steps(
    call: Any, worker: Any, data: Any, loss_fn: Any, eval_mode: bool = False, *sizes: Any, **options: Any
) -> Any:
    result = call(data, loss_fn, False, *sizes, **options)
    return {**result, "grad_norm": None} if eval_mode else result


@mutant("evaluation_moves_the_schedule", "An evaluation advances the learning-rate schedule.")
@around(PolicyWorker.train)
def _evaluation_moves_the_schedule(
    call: Any, worker: Any, data: Any, loss_fn: Any, eval_mode: bool = False, *sizes: Any, **options: Any
) -> Any:
    result = call(data, loss_fn, eval_mode, *sizes, **options)
    worker.progress.train_calls += eval_mode
    return result


@mutant("scores_from_a_cache", "Scoring returns cached log-probabilities from before the last step.")
@around(PolicyWorker.get_logprobs)
def _scores_from_a_cache(call: Any, worker: Any, *args: Any, **options: Any) -> Any:
    if not hasattr(worker, "cached"):
        worker.cached = call(*args, **options)
    return worker.cached


@mutant("data_changed_in_place", "Training clears the masks of the caller's batch.")
@around(PolicyWorker.train)
def _data_changed_in_place(call: Any, worker: Any, data: Any, *args: Any, **options: Any) -> Any:
    result = call(data, *args, **options)
    data["token_mask"].zero_()
    return result


@mutant("reference_keeps_the_share_of_the_policy", "`sync_reference` mixes with alpha and 1 - alpha swapped.")
@around(Engine.mix)
def _reference_keeps_the_share(call: Any, engine: Any, snapshot: Any, other: Any, alpha: float) -> None:
    call(snapshot, other, 1 - alpha if alpha < 1 else alpha)


@mutant(
    "reference_stays_after_an_exception",
    "An exception inside `use_reference_model` leaves the reference weights in place.",
)
@around(PolicyWorker.use_reference_model)
@contextmanager
def _reference_stays_after_an_exception(call: Any, worker: Any) -> Any:
    current = worker.engine.snapshot()
    worker.engine.restore(worker.scoring.reference.weights)
    yield
    worker.engine.restore(current)


@mutant("swap_forgets_moments", "Switching to the reference model discards the optimizer's moments.")
@around(PolicyWorker.use_reference_model)
@contextmanager
def _swap_forgets_moments(call: Any, worker: Any) -> Any:
    with call():
        yield
    optimizer_of(worker.engine).state.clear()


@mutant(
    "reference_at_temperature_one", "The reference is scored at temperature 1, the policy at the sampling temperature."
)
@around(PolicyWorker.use_reference_model)
@contextmanager
def _reference_at_temperature_one(call: Any, worker: Any) -> Any:
    configured = worker.scoring.temperature
    with call():
        worker.scoring.temperature = 1.0
        try:
            yield
        finally:
            worker.scoring.temperature = configured


@mutant("weights_of_before_come_back", "Onloading restores the copy made by the first offload.")
@around(PolicyWorker.offload_after_refit)
def _weights_of_before_come_back(call: Any, worker: Any) -> Any:
    first = vars(worker).setdefault("first", worker.engine.snapshot())
    moved = call()
    worker.engine.restore(first)
    return moved


@mutant("moved_bytes_not_told", "The transitions do not report how many bytes they moved.")
@around(Engine.move)
def _moved_bytes_not_told(call: Any, engine: Any, *args: Any, **options: Any) -> int:
    call(*args, **options)
    return -1


@mutant("offloaded_weights_stay", "The step updates a copy on the device; the weights in CPU memory stay unchanged.")
@around(Engine.clip_and_step)
def _offloaded_weights_stay(call: Any, engine: Any, *args: Any) -> Any:
    before = engine.snapshot()
    done = call(*args)
    if engine.config.offload.parameters:
        engine.restore(before)
    return done


@mutant("evaluation_wants_an_optimizer", "Evaluation reads the learning rate from the optimizer and so requires one.")
@around(PolicyWorker.train)
def _evaluation_wants_an_optimizer(call: Any, worker: Any, *args: Any, **options: Any) -> Any:
    try:
        optimizer_of(worker.engine)
    except MutantNotApplicable as error:
        raise AttributeError("optimizer") from error
    return call(*args, **options)


@mutant("failures_swallowed", "An exception in a training step is swallowed, and training continues.")
@around(PolicyWorker.train)
def _failures_swallowed(call: Any, worker: Any, *args: Any, **options: Any) -> Any:
    try:
        return call(*args, **options)
    except RuntimeError:
        return {"global_loss": torch.zeros(1), "grad_norm": torch.zeros(1), "metrics": {}, "skipped": 0}


@mutant("shutdown_fails", "The engine fails to release its resources at shutdown.")
@around(PolicyWorker.shutdown)
def _shutdown_fails(call: Any, worker: Any) -> None:
    call()
    raise RuntimeError("resources were not released")


_BUILT_BEFORE: list[bool] = []


@mutant("state_left_behind", "A second model uses state that the first one left in the engine's globals.")
@around(Engine.build)
def _state_left_behind(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    if _BUILT_BEFORE:
        change_weights(engine, lambda weight: 0.9 * weight)
    _BUILT_BEFORE.append(True)


@mutant("input_not_checked", "The worker does not validate its input.")
@around(PolicyWorker.train)
def _input_not_checked(call: Any, worker: Any, *args: Any, **options: Any) -> Any:
    try:
        return call(*args, **options)
    except UserError as error:
        raise RuntimeError(f"internal error: {error}") from error


@mutant("rest_of_rows_dropped", "Rows beyond the last whole global batch are dropped.")
@around(Training.global_batches)
def _rest_of_rows_dropped(call: Any, training: Any, data: Any, global_batch_size: int) -> Any:
    local = global_batch_size // training.engine.data_parallel_size()
    return call(data.slice(0, data.size // local * local), global_batch_size)


@around(Engine.build)
def _build_anything(call: Any, engine: Any, **how: Any) -> None:
    try:
        call(**how)
    except UserError:
        engine.model = torch.nn.Linear(1, 1)


class _AnySection(BaseModel):
    """A section that accepts any keys."""

    model_config = ConfigDict(extra="allow")


MUTANTS = (
    mutant("scoring_rounds_weights", "Scoring rounds the weights to bfloat16.")(
        after(PolicyWorker.get_logprobs, lambda worker: change_weights(worker.engine, to_bfloat16))
    ),
    mutant("reference_follows", "The reference model is updated at each step.")(
        after(PolicyWorker.train, lambda worker: setattr(worker.scoring, "reference", SnapshotReference(worker.engine)))
    ),
    mutant("policy_moves_with_the_reference", "`sync_reference` leaves the mixed weights in the policy.")(
        after(PolicyWorker.sync_reference, lambda worker: worker.engine.restore(worker.scoring.reference.weights))
    ),
    mutant("reseeds", "The engine seeds the process-wide random state.")(
        before(Engine.build, lambda engine: torch.manual_seed(0))
    ),
    mutant("preparing_rounds_weights", "`prepare_for_training` rounds the weights to bfloat16.")(
        after(PolicyWorker.prepare_for_training, lambda worker: change_weights(worker.engine, to_bfloat16))
    ),
    mutant("moments_left_behind", "The optimizer's state is not onloaded again.")(
        after(PolicyWorker.offload_after_refit, lambda worker: optimizer_of(worker.engine).state.clear())
    ),
    mutant("reference_never_moves", "`sync_reference` does nothing.")(
        around(PolicyWorker.sync_reference)(lambda call, worker, alpha: None)
    ),
    mutant("undeclared_ignored", "An unsupported call silently does nothing.")(
        together(
            around(PolicyWorker.save_checkpoint, PolicyWorker.score, PolicyWorker.save_adapter)(
                lambda call, worker, *args, **options: None
            ),
            around(PolicyWorker.prepare_weights_for_ipc)(lambda call, worker: ([], 0.0)),
            around(PolicyWorker.prepare_info_for_collective)(lambda call, worker: {}),
        )
    ),
    mutant("fresh_weights", "Weights that cannot be loaded are replaced by random ones.")(
        together(
            _build_anything,
            around(Engine.snapshot)(lambda call, engine: {}),
            around(Engine.close)(lambda call, engine: None),
        )
    ),
    mutant(
        "unknown_keys_taken",
        "The backend's own section accepts unknown keys.",
        break_record=lambda record: replace(record, config_model=_AnySection),
    )(together()),
)
