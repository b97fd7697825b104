"""LoRA: the base is trained, adapters are on or off at the wrong time, or initialized, merged or saved wrongly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from rlframework.base.errors import DataError
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.policy.engine import Engine
from rlframework.policy.lora_math import is_adapter
from rlframework.policy.scoring import SnapshotReference
from rlframework.policy.worker import PolicyWorkerBase
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import after, around, before, in_silence, mutant, result, together
from rlframework_conformance.mutants.policy_worker.engine_access import (
    module_of,
    optimizer_of,
    to_bfloat16,
    whole_weights,
)


@contextmanager
def _unscaled(engine: Any) -> Any:
    """Set the scale of the adapters, alpha / rank, to 1 inside the context."""
    config = engine.config
    lora = config.lora.model_copy(update={"alpha": float(config.lora.rank)})
    engine.config = config.model_copy(update={"lora": lora})
    try:
        yield
    finally:
        engine.config = config


@around(Engine.build)
def _build_unscaled(call: Any, engine: Any, **how: Any) -> None:
    with _unscaled(engine):
        call(**how)


@around(Engine.gather_weights)
def _merge_unscaled(call: Any, engine: Any, names: Any) -> Any:
    with _unscaled(engine):
        yield from call(names)


@mutant("lora_all_linear_of_attention", "all-linear adapts the layers of attention only.")
@around(Engine.build)
def _all_linear_of_attention(call: Any, engine: Any, **how: Any) -> None:
    lora = engine.config.lora
    if lora is not None and lora.adapts_all_linear:
        lora = lora.model_copy(update={"target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")})
        engine.config = engine.config.model_copy(update={"lora": lora})
    call(**how)


def _change_adapters(engine: Any, change: Callable[[str, Tensor], Tensor]) -> None:
    adapters = dict(engine.gather_adapters(engine.adapter_specs()))
    engine.take_adapters({name: change(name, matrix) for name, matrix in adapters.items()})


def _draw(engine: Any, fragment: str, seed: int) -> None:
    """Draw the matrices whose names contain `fragment` from a generator."""
    generator = torch.Generator().manual_seed(seed)
    _change_adapters(
        engine, lambda name, matrix: torch.randn(matrix.shape, generator=generator) if fragment in name else matrix
    )


@mutant("lora_trains_the_base", "The norms of the base model are trained along with the adapters.")
@around(Engine.build)
def _trains_the_base(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    norms = [parameter for parameter in module_of(engine).parameters() if parameter.ndim == 1]
    for norm in norms:
        norm.requires_grad_(True)
    optimizer_of(engine).add_param_group({"params": norms})


@mutant("lora_decays_the_base", "Weight decay shrinks the frozen weights too.")
@around(Engine.clip_and_step)
def _decays_the_base(call: Any, engine: Any, max_grad_norm: Any, lr: float) -> Any:
    done = call(max_grad_norm, lr)
    factor = 1 - lr * engine.config.optimizer.weight_decay
    weights = engine.snapshot()
    engine.restore({name: weight if is_adapter(name) else weight * factor for name, weight in weights.items()})
    return done


@mutant("lora_a_not_trained", "A keeps its initial value.")
@around(Engine.clip_and_step)
def _a_not_trained(call: Any, engine: Any, *args: Any) -> Any:
    before = {name: matrix.clone() for name, matrix in engine.gather_adapters(engine.adapter_specs())}
    done = call(*args)
    _change_adapters(engine, lambda name, matrix: before[name] if ".lora_A." in name else matrix)
    return done


@mutant("lora_on_in_reference", "Adapters stay on while the reference model is scored.")
@around(Engine.without_adapters)
@contextmanager
def _on_in_reference(call: Any, engine: Any) -> Any:
    yield


@around(Engine.without_adapters)
@contextmanager
def _leave_off(call: Any, engine: Any) -> Any:
    vars(engine).setdefault("off", ExitStack()).enter_context(call())
    yield


@mutant("lora_frozen_after_reference", "The optimizer loses the adapters after the reference model is scored.")
@around(Engine.without_adapters)
@contextmanager
def _frozen_after_reference(call: Any, engine: Any) -> Any:
    with call():
        yield
    for group in optimizer_of(engine).param_groups:
        group["params"] = []


def _changed_merge(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Break merging: merged weights become `base + change(merged - base)`."""

    @around(Engine.gather_weights)
    def gather_weights(call: Any, engine: Any, names: Any) -> Any:
        names = list(names)
        with engine.without_adapters():
            base = {name: weight.clone() for name, weight in call(names)}
        for name, weight in call(names):
            yield name, base[name] + change(weight - base[name])

    return gather_weights


@mutant("lora_checkpoint_with_the_base", "Each checkpoint contains the base model too.")
@around(PolicyWorker.save_checkpoint)
def _checkpoint_with_the_base(call: Any, worker: Any, weights_path: str, *args: Any, **options: Any) -> None:
    from safetensors.torch import save_file

    call(weights_path, *args, **options)
    save_file(whole_weights(worker.engine), f"{weights_path}/base.safetensors")


@mutant("lora_generates_with_the_base", "Samples are drawn from the base model without the adapters.")
@around(PolicyWorker.exchange)
def _generates_with_the_base(call: Any, worker: Any, *args: Any, **options: Any) -> Any:
    with worker.engine.without_adapters():
        return call(*args, **options)


MUTANTS = (
    mutant("lora_b_not_zero", "B is initialized randomly, so the initial model differs from its base.")(
        after(Engine.build, lambda engine: _draw(engine, ".lora_B.", 7))
    ),
    mutant("lora_a_by_rank", "Each rank initializes A from a generator of its own.", layout=Layout(data=2))(
        after(Engine.build, lambda engine: _draw(engine, ".lora_A.", 100 + engine.context.rank))
    ),
    mutant("lora_copies_the_reference", "A copy of the base is kept for the reference model.")(
        after(
            PolicyWorkerBase.__init__,
            lambda worker: setattr(worker.scoring, "reference", SnapshotReference(worker.engine)),
        )
    ),
    mutant("lora_adapters_not_saved", "The adapter files contain zeros.")(
        result(Engine.gather_adapters, lambda adapters: ((name, torch.zeros_like(matrix)) for name, matrix in adapters))
    ),
    mutant("lora_adapters_in_bfloat16", "Adapters are saved in bfloat16.")(
        result(Engine.gather_adapters, lambda adapters: ((name, to_bfloat16(matrix)) for name, matrix in adapters))
    ),
    mutant("lora_misfits_taken", "Adapters that do not fit the model are silently skipped.")(
        in_silence(PolicyWorker.load_adapter, DataError)
    ),
    mutant("lora_scale_forgotten", "The adapters' output is not scaled by alpha / rank.")(
        together(_build_unscaled, _merge_unscaled)
    ),
    mutant("lora_off_after_reference", "Adapters stay off after the reference model is scored.")(
        together(_leave_off, before(Engine.close, lambda engine: vars(engine).get("off", ExitStack()).close()))
    ),
    mutant("lora_merged_with_the_wrong_sign", "Merging subtracts the adapters.")(_changed_merge(lambda added: -added)),
    mutant("lora_merged_transposed", "Square layers are merged with (B A) transposed.")(
        _changed_merge(lambda added: added.T if added.ndim == 2 and added.shape[0] == added.shape[1] else added)
    ),
    mutant("lora_not_merged", "The base model is saved without the adapters.")(_changed_merge(torch.zeros_like)),
    mutant("lora_checkpoint_without_moments", "Resuming drops the optimizer moments of the adapters.")(
        around(Engine.load_moments)(lambda call, engine, moments: None)
    ),
)
