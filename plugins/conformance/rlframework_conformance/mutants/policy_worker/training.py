"""Violations of contract 3: training that differs from a plain AdamW loop."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import (
    change_weights,
    gradients_of,
    in_engine,
    in_service,
    module_of,
    optimizer_of,
    to_bfloat16,
)


def before_the_step(change: Any) -> Any:
    """Call `change(worker, max_grad_norm)` before each step; it may modify gradients and returns the clipping limit."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
                return super().clip_and_step(change(self, max_grad_norm), lr)

        return Broken

    return break_it


def after_the_step(change: Any) -> Any:
    """Report `change(worker, norm, skipped, max_grad_norm)` in place of the norm and of whether a step was skipped."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
                return change(self, *super().clip_and_step(max_grad_norm, lr), max_grad_norm)

        return Broken

    return break_it


def scale_gradients(worker: Any, factor: float) -> None:
    """Multiply this rank's shards of the gradient by `factor`."""
    for gradient in gradients_of(worker):
        gradient.mul_(factor)


def _scaled_learning_rate(factor: float) -> Any:
    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
                return super().clip_and_step(max_grad_norm, lr * factor)

        return Broken

    return break_it


update_too_small = mutant(
    "update_too_small",
    "Each update is 2% too small.",
    "test_twenty_steps_end_at_the_oracles_weights",
    "test_updates_go_against_the_gradient_at_the_learning_rate",
)(_scaled_learning_rate(0.98))


def _negate_gradients(worker: Any, limit: Any) -> Any:
    scale_gradients(worker, -1.0)
    return limit


update_sign = mutant(
    "update_sign",
    "Updates follow the gradient instead of opposing it.",
    "test_updates_go_against_the_gradient_at_the_learning_rate",
    "test_twenty_steps_end_at_the_oracles_weights",
    "test_first_step_is_that_of_the_oracle",
)(before_the_step(_negate_gradients))


def _optimizer_settings(**settings: Any) -> Any:
    """Override `settings` in all groups of the optimizer."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def build(self, *, init_optimizer: bool) -> None:
                super().build(init_optimizer=init_optimizer)
                for group in optimizer_of(self).param_groups:
                    group.update(settings)

        return Broken

    return break_it


@mutant(
    "decay_on_everything",
    "Weight decay is applied to norms and biases too.",
    "test_weight_decay_spares_parameters_of_one_dimension",
    "test_betas_and_epsilon_are_the_configured_ones",
)
@in_engine
def decay_on_everything(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            super().build(init_optimizer=init_optimizer)
            for group in optimizer_of(self).param_groups:
                group["weight_decay"] = self.config.optimizer.weight_decay

    return Broken


default_betas = mutant(
    "default_betas",
    "The optimizer uses default betas and ignores the configured ones.",
    "test_betas_and_epsilon_are_the_configured_ones",
)(_optimizer_settings(betas=(0.9, 0.999)))

default_epsilon = mutant(
    "default_epsilon",
    "The optimizer uses the default epsilon and ignores the configured one.",
    "test_betas_and_epsilon_are_the_configured_ones",
    "test_first_step_is_that_of_the_oracle",
)(_optimizer_settings(eps=1e-8))


@mutant(
    "schedule_ignored",
    "The learning rate is constant, regardless of the schedule.",
    "test_the_schedule_moves_once_a_call",
)
@in_engine
def schedule_ignored(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
            return super().clip_and_step(max_grad_norm, self.config.optimizer.lr)

    return Broken


@mutant(
    "schedule_moves_each_step",
    "The schedule advances with each optimizer step instead of each call.",
    "test_the_schedule_moves_once_a_call",
)
@in_service("training_class")
def schedule_moves_each_step(training_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(training_class):  # type: ignore[misc]
        def after_step(self, *args: Any) -> Any:
            self.progress.train_calls += 1
            return super().after_step(*args)

    return Broken


@mutant(
    "tied_head_untied",
    "A tied head becomes a parameter of its own when the model is sharded.",
    "test_a_tied_head_stays_tied",
)
@in_engine
def tied_head_untied(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            super().build(init_optimizer=init_optimizer)
            head = module_of(self).get_output_embeddings()  # type: ignore[operator]
            if head.weight is module_of(self).get_input_embeddings().weight:  # type: ignore[operator]
                head.weight = torch.nn.Parameter(head.weight.detach().clone())
                optimizer_of(self).param_groups[0]["params"].append(head.weight)

    return Broken


def _replace_nan_by_0(worker: Any, limit: Any) -> Any:
    for gradient in gradients_of(worker):
        gradient.nan_to_num_(0.0)
    return limit


not_finite_steps = mutant(
    "not_finite_steps",
    "A non-finite gradient is set to 0, and the step follows the old momentum.",
    "test_a_gradient_that_is_not_finite_is_skipped",
    "test_too_many_gradients_that_are_not_finite_end_the_run",
)(before_the_step(_replace_nan_by_0))


def _skip_at_zero(worker: Any, norm: float, skipped: bool, limit: float | None) -> tuple[float, bool]:
    return norm, skipped or norm == 0.0


zero_gradient_is_a_skipped_step = mutant(
    "zero_gradient_is_a_skipped_step",
    "A step whose gradient is 0 is reported as skipped, so several in a row end the run.",
    "test_a_gradient_of_zero_is_an_ordinary_step",
)(after_the_step(_skip_at_zero))


@mutant(
    "skips_for_ever",
    "Steps with non-finite gradients are skipped without limit.",
    "test_too_many_gradients_that_are_not_finite_end_the_run",
)
@in_service("training_class")
def skips_for_ever(training_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(training_class):  # type: ignore[misc]
        def after_step(self, norm: Any, skipped: bool) -> None:
            self.progress.weights_version += not skipped

    return Broken


@mutant(
    "steps_on_nothing",
    "A batch without valid tokens takes an optimizer step with a zero gradient.",
    "test_a_batch_without_a_valid_token_takes_no_step",
)
@in_service("microbatching_class")
def steps_on_nothing(microbatching_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(microbatching_class):  # type: ignore[misc]
        def global_batch(self, *args: Any) -> Any:
            found = super().global_batch(*args)
            found["global_valid_toks"] = found["global_valid_toks"].clamp(min=1.0)
            return found

    return Broken


def _broken_head_value(name: str, change: Any) -> Any:
    """Break the value `name` of the head's output: it becomes `change(value)`."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def forward_backward(self, microbatches: Any, head: Any, step: Any, *, forward_only: bool) -> Any:
                def broken(output: Any, microbatch: Any) -> Any:
                    if getattr(output, name) is not None:
                        setattr(output, name, change(getattr(output, name)))
                    return step(output, microbatch)

                return super().forward_backward(microbatches, head, broken, forward_only=forward_only)

        return Broken

    return break_it


logits_of_the_wrong_token = mutant(
    "logits_of_the_wrong_token",
    "The logits passed to the loss are shifted by one token.",
    "test_losses_may_ask_for_logits",
)(_broken_head_value("logits", lambda logits: logits.roll(1, dims=0)))

entropy_in_bits = mutant(
    "entropy_in_bits", "The entropy passed to the loss is in bits instead of nats.", "test_losses_may_ask_for_entropy"
)(_broken_head_value("entropy", lambda entropy: entropy / math.log(2)))

entropy_without_gradient = mutant(
    "entropy_without_gradient",
    "The entropy passed to the loss has no gradient, also where the loss asks for it.",
    "test_losses_may_ask_for_entropy",
)(_broken_head_value("entropy", lambda entropy: entropy.detach() + 0.0 * entropy))


def _zero_first_gradient(worker: Any, limit: Any) -> Any:
    if worker.config.activation_checkpointing:
        next(gradients_of(worker)).zero_()
    return limit


checkpointing_loses_a_gradient = mutant(
    "checkpointing_loses_a_gradient",
    "With activation checkpointing, the first weight gets no gradient.",
    "test_activation_checkpointing_changes_nothing",
)(before_the_step(_zero_first_gradient))


@mutant(
    "weights_in_bfloat16",
    "Weights are kept in bfloat16, so small updates are lost.",
    "test_small_updates_are_not_lost_in_bfloat16",
)
@in_engine
def weights_in_bfloat16(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
            done = super().clip_and_step(max_grad_norm, lr)
            if self.config.precision == "bfloat16":
                change_weights(self, to_bfloat16)
            return done

    return Broken


@mutant(
    "learns_the_padding_token",
    "The embedding of the padding token is trained where a row contains it.",
    "test_a_padding_token_inside_a_row_is_learnt_as_in_the_model",
)
@in_engine
def learns_the_padding_token(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            with _without_padding_token(self):
                super().build(init_optimizer=init_optimizer)

    return Broken


@contextmanager
def _without_padding_token(engine: Any) -> Iterator[None]:
    """Give the engine a copy of its model whose configuration names no padding token, inside the context."""
    config = engine.config
    with TemporaryDirectory() as folder:
        copy = shutil.copytree(config.model_name, Path(folder, "model"))
        settings = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        (copy / "config.json").write_text(json.dumps({**settings, "pad_token_id": None}), encoding="utf-8")
        engine.config = config.model_copy(update={"model_name": str(copy)})
        try:
            yield
        finally:
            engine.config = config
