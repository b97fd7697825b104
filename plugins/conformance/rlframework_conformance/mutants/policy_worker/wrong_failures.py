"""Violations of contracts 7 and 8: silent failures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from rlframework.base.errors import UserError
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.policy.engine import Engine
from rlframework.policy.training_step import Training
from rlframework_conformance.mutants.mutant import around, mutant, together
from rlframework_conformance.mutants.policy_worker.engine_access import change_weights


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


undeclared_ignored = mutant("undeclared_ignored", "An unsupported call silently does nothing.")(
    together(
        around(PolicyWorker.save_checkpoint, PolicyWorker.score, PolicyWorker.save_adapter)(
            lambda call, worker, *args, **options: None
        ),
        around(PolicyWorker.prepare_weights_for_ipc)(lambda call, worker: ([], 0.0)),
        around(PolicyWorker.prepare_info_for_collective)(lambda call, worker: {}),
    )
)


@around(Engine.build)
def _build_anything(call: Any, engine: Any, **how: Any) -> None:
    try:
        call(**how)
    except UserError:
        engine.model = torch.nn.Linear(1, 1)


fresh_weights = mutant("fresh_weights", "Weights that cannot be loaded are replaced by random ones.")(
    together(
        _build_anything,
        around(Engine.snapshot)(lambda call, engine: {}),
        around(Engine.close)(lambda call, engine: None),
    )
)


class _AnySection(BaseModel):
    """A section that accepts any keys."""

    model_config = ConfigDict(extra="allow")


unknown_keys_taken = mutant(
    "unknown_keys_taken",
    "The backend's own section accepts unknown keys.",
    break_record=lambda record: replace(record, config_model=_AnySection),
)(together())
