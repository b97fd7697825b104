"""Violations of contracts 7 and 8: silent failures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from rlframework.base.errors import UserError
from rlframework_conformance.mutants.mutant import Mutant, mutant
from rlframework_conformance.mutants.policy_worker.engine_access import in_engine, in_service


@mutant(
    "failures_swallowed",
    "An exception in a training step is swallowed, and training continues.",
    "test_a_failing_worker_fails_the_call",
)
def failures_swallowed(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().train(*args, **kwargs)
            except RuntimeError:
                return {"global_loss": torch.zeros(1), "grad_norm": torch.zeros(1), "metrics": {}, "skipped": 0}

    return Broken


@mutant(
    "shutdown_fails", "The engine fails to release its resources at shutdown.", "test_shutdown_ends_in_peace_and_twice"
)
def shutdown_fails(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def shutdown(self) -> None:
            super().shutdown()
            raise RuntimeError("resources were not released")

    return Broken


@mutant(
    "state_left_behind",
    "A second model uses state that the first one left in the engine's globals.",
    "test_one_policy_after_another",
)
@in_engine
def state_left_behind(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            super().build(init_optimizer=init_optimizer)
            if _BUILT_BEFORE:
                self.restore({name: 0.9 * weight for name, weight in self.snapshot().items()})
            _BUILT_BEFORE.append(True)

    return Broken


_BUILT_BEFORE: list[bool] = []


@mutant(
    "input_not_checked", "The worker does not validate its input.", "test_bad_batches_are_refused_and_nothing_is_done"
)
def input_not_checked(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().train(*args, **kwargs)
            except UserError as error:
                raise RuntimeError(f"internal error: {error}") from error

    return Broken


@mutant(
    "rest_of_rows_dropped",
    "Rows beyond the last whole global batch are dropped.",
    "test_workers_refuse_rows_that_do_not_divide",
)
@in_service("training_class")
def rest_of_rows_dropped(training_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(training_class):  # type: ignore[misc]
        def global_batches(self, data: Any, global_batch_size: int) -> Any:
            local = global_batch_size // self.engine.data_parallel_size()
            return super().global_batches(data.slice(0, data.size // local * local), global_batch_size)

    return Broken


@mutant("undeclared_ignored", "An unsupported call silently does nothing.", "test_what_is_not_declared_is_refused")
def undeclared_ignored(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            return None

        def prepare_weights_for_ipc(self) -> Any:
            return [], 0.0

        def prepare_info_for_collective(self) -> Any:
            return {}

        def score(self, data: Any, micro_batch_size: Any = None) -> Any:
            return None

        def save_adapter(self, path: str) -> None:
            return None

    return Broken


@mutant(
    "fresh_weights",
    "Weights that cannot be loaded are replaced by random ones.",
    "test_a_model_that_is_not_there_is_an_error",
)
@in_engine
def fresh_weights(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            try:
                super().build(init_optimizer=init_optimizer)
            except UserError:
                self.model = torch.nn.Linear(1, 1)

        def snapshot(self) -> Any:
            return {}

        def close(self) -> None:
            return None

    return Broken


class _AnySection(BaseModel):
    """A section that accepts any keys."""

    model_config = ConfigDict(extra="allow")


unknown_keys_taken = Mutant(
    "unknown_keys_taken",
    "The backend's own section accepts unknown keys.",
    ("test_an_unknown_key_of_its_own_section_is_refused",),
    lambda worker_class: worker_class,
    break_record=lambda record: replace(record, config_model=_AnySection),
)
