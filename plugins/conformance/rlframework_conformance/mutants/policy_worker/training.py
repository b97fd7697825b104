"""Violations of contract 3: training that differs from a plain AdamW loop, clipping included.

With Muon: it is ignored, has another momentum, or is applied to shards in place of whole matrices.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.policy.engine import Engine
from rlframework.policy.microbatching import Microbatching
from rlframework.policy.training_step import Training
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import around, before, mutant
from rlframework_conformance.mutants.policy_worker.engine_access import (
    SHARDS,
    around_measured_step,
    change_weights,
    changed_output,
    gradients_of,
    module_of,
    norm_of_own_shards,
    optimizer_of,
    scale_gradients,
    to_bfloat16,
    total_norm,
)


@mutant("update_too_small", "Each update is 2% too small.")
@around(Engine.clip_and_step)
def _update_too_small(call: Any, engine: Any, max_grad_norm: Any, lr: float) -> Any:
    return call(max_grad_norm, lr * 0.98)


@mutant("decay_on_everything", "Weight decay is applied to norms and biases too.")
@around(Engine.build)
def _decay_on_everything(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    for group in optimizer_of(engine).param_groups:
        group["weight_decay"] = engine.config.optimizer.weight_decay


@mutant("default_betas", "The optimizer uses default betas and ignores the configured ones.")
@around(Engine.build)
def _default_betas(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    for group in optimizer_of(engine).param_groups:
        group["betas"] = (0.9, 0.999)


@mutant("default_epsilon", "The optimizer uses the default epsilon and ignores the configured one.")
@around(Engine.build)
def _default_epsilon(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    for group in optimizer_of(engine).param_groups:
        group["eps"] = 1e-8


@mutant("schedule_ignored", "The learning rate is constant, regardless of the schedule.")
@around(Engine.clip_and_step)
def _schedule_ignored(call: Any, engine: Any, max_grad_norm: Any, lr: float) -> Any:
    return call(max_grad_norm, engine.config.optimizer.lr)


@mutant("schedule_moves_each_step", "The schedule advances with each optimizer step instead of each call.")
@around(Training.after_step)
def _schedule_moves_each_step(call: Any, training: Any, *args: Any) -> None:
    training.progress.train_calls += 1
    call(*args)


@mutant("tied_head_untied", "A tied head becomes a parameter of its own when the model is sharded.")
@around(Engine.build)
def _tied_head_untied(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    head = module_of(engine).get_output_embeddings()
    if head.weight is module_of(engine).get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        optimizer_of(engine).param_groups[0]["params"].append(head.weight)


@mutant("not_finite_steps", "A non-finite gradient is set to 0, and the step follows the old momentum.")
@around(Engine.clip_and_step)
def _not_finite_steps(call: Any, engine: Any, *args: Any) -> Any:
    for gradient in gradients_of(engine):
        gradient.nan_to_num_(0.0)
    return call(*args)


@mutant(
    "zero_gradient_is_a_skipped_step",
    "A step whose gradient is 0 is reported as skipped, so several in a row end the run.",
)
@around(Engine.clip_and_step)
def _zero_gradient_is_a_skipped_step(call: Any, engine: Any, *args: Any) -> Any:
    norm, skipped = call(*args)
    return norm, skipped or norm == 0.0


@mutant("skips_for_ever", "Steps with non-finite gradients are skipped without limit.")
@around(Training.after_step)
def _skips_for_ever(call: Any, training: Any, norm: Any, skipped: bool) -> None:
    training.progress.weights_version += not skipped


@mutant("steps_on_nothing", "A batch without valid tokens takes an optimizer step with a zero gradient.")
@around(Microbatching.global_batch)
def _steps_on_nothing(call: Any, microbatching: Any, *args: Any) -> Any:
    processed = call(*args)
    return {**processed, "global_valid_toks": processed["global_valid_toks"].clamp(min=1.0)}


@mutant("checkpointing_loses_a_gradient", "With activation checkpointing, the first weight gets no gradient.")
@around(Engine.clip_and_step)
def _checkpointing_loses_a_gradient(call: Any, engine: Any, *args: Any) -> Any:
    if engine.config.activation_checkpointing:
        next(gradients_of(engine)).zero_()
    return call(*args)


@mutant("weights_in_bfloat16", "Weights are kept in bfloat16, so small updates are lost.")
@around(Engine.clip_and_step)
def _weights_in_bfloat16(call: Any, engine: Any, *args: Any) -> Any:
    done = call(*args)
    if engine.config.precision == "bfloat16":
        change_weights(engine, to_bfloat16)
    return done


@mutant("learns_the_padding_token", "The embedding of the padding token is trained where a row contains it.")
@around(Engine.build)
def _learns_the_padding_token(call: Any, engine: Any, **how: Any) -> None:
    config = engine.config
    with TemporaryDirectory() as folder:  # a copy of the model whose configuration names no padding token
        copy = shutil.copytree(config.model_name, Path(folder, "model"))
        settings = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        (copy / "config.json").write_text(json.dumps({**settings, "pad_token_id": None}), encoding="utf-8")
        engine.config = config.model_copy(update={"model_name": str(copy)})
        call(**how)
    engine.config = config


@mutant("clipping_left_out", "The gradient is never clipped.")
@around(Engine.clip_and_step)
def _clipping_left_out(call: Any, engine: Any, max_grad_norm: Any, lr: float) -> Any:
    return call(None, lr)


@around_measured_step
def clips_own_shards(call: Any, engine: Any, max_grad_norm: Any, lr: float) -> Any:
    """Clip each rank's shards of the gradient by their own norm. Needs `SHARDS`."""
    own = norm_of_own_shards(engine)
    if max_grad_norm is None or own <= max_grad_norm:
        return call(None, lr)
    return call(total_norm(engine.gradients.values()) * max_grad_norm / own, lr)


@mutant("gradient_scaled_up", "Gradients are rescaled to the clipping limit even when they are smaller.")
@around(Engine.clip_and_step)
def _gradient_scaled_up(call: Any, engine: Any, max_grad_norm: Any, lr: float) -> Any:
    if max_grad_norm is not None and (norm := total_norm(gradients_of(engine))):
        scale_gradients(engine, max_grad_norm / norm)
    return call(max_grad_norm, lr)


@mutant("norm_after_clipping", "The reported gradient norm is the one after clipping.")
@around(Engine.clip_and_step)
def _norm_after_clipping(call: Any, engine: Any, max_grad_norm: Any, lr: float) -> Any:
    norm, skipped = call(max_grad_norm, lr)
    return norm if max_grad_norm is None else min(norm, max_grad_norm), skipped


@mutant(
    "clipping_divides_by_zero", "Clipping divides the gradient by its norm, so a gradient of 0 makes the weights NaN."
)
@around(Engine.clip_and_step)
def _clipping_divides_by_zero(call: Any, engine: Any, *args: Any) -> Any:
    norm, skipped = call(*args)
    if norm == 0.0:
        change_weights(engine, lambda weight: weight * math.nan)
    return norm, skipped


@mutant("muon_ignored", "AdamW updates the matrices too.")
@around(Engine.build)
def _ignored(call: Any, engine: Any, **how: Any) -> None:
    optimizer = engine.config.optimizer.model_copy(update={"name": "adamw"})
    engine.config = engine.config.model_copy(update={"optimizer": optimizer})
    call(**how)


@mutant("muon_default_momentum", "Muon uses the default momentum and ignores the configured one.")
@around(Engine.clip_and_step)
def _default_momentum(call: Any, engine: Any, *args: Any) -> Any:
    for group, _ in _matrices(engine):
        group["momentum"] = 0.95
    return call(*args)


@mutant("muon_on_shards", "Each rank orthogonalizes its shard of a matrix.", layout=Layout(data=2))
@around(Engine.build)
def _on_shards(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    group = next(_matrices(engine))[0]
    matrices = [(matrix, nn.Parameter(_local(matrix))) for _, matrix in _matrices(engine)]
    settings = {key: group[key] for key in ("lr", "weight_decay", "momentum")}
    muon = torch.optim.Muon([shard for _, shard in matrices], adjust_lr_fn="match_rms_adamw", **settings)

    def step_on_shards(*arguments: Any) -> None:
        for matrix, shard in matrices:
            shard.grad, matrix.grad = _local(matrix.grad), None
        muon.step()

    optimizer_of(engine).register_step_pre_hook(step_on_shards)


@mutant("muon_average_not_loaded", "Muon's average of gradients starts from zero again.")
@around(Engine.load_moments)
def _average_not_loaded(call: Any, engine: Any, moments: Any) -> None:
    call(moments)
    for _, matrix in _matrices(engine):
        optimizer_of(engine).state[matrix]["exp_avg"].zero_()


def _matrices(engine: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the matrices that Muon updates, each with its parameter group."""
    for group in optimizer_of(engine).param_groups:
        yield from ((group, matrix) for matrix in group["params"] if "momentum" in group)


def _local(tensor: Any) -> Tensor:
    shard: Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return shard


MUTANTS = (
    mutant("update_sign", "Updates follow the gradient instead of opposing it.")(
        before(Engine.clip_and_step, lambda engine: scale_gradients(engine, -1.0))
    ),
    mutant("logits_of_the_wrong_token", "The logits passed to the loss are shifted by one token.")(
        changed_output("logits", lambda logits: logits.roll(1, dims=0))
    ),
    mutant("entropy_in_bits", "The entropy passed to the loss is in bits instead of nats.")(
        changed_output("entropy", lambda entropy: entropy / math.log(2))
    ),
    mutant(
        "entropy_without_gradient", "The entropy passed to the loss has no gradient, also where the loss asks for it."
    )(changed_output("entropy", lambda entropy: entropy.detach() + 0.0 * entropy)),
    mutant(
        "clip_per_rank",
        "Each rank clips its shard of the gradient by the norm of that shard.",
        layout=Layout(data=2),
        needs=SHARDS,
    )(clips_own_shards),
)
