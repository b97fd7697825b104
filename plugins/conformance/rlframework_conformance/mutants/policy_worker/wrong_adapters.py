"""LoRA: the base is trained, adapters are on or off at the wrong time, or initialized, merged or saved wrongly."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from rlframework.base.errors import DataError
from rlframework.policy.lora_math import is_adapter
from rlframework.policy.reference import SnapshotReference
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import in_engine, module_of, optimizer_of, to_bfloat16

TWENTY = "test_twenty_steps_of_adapters_end_at_the_oracles"
GRADIENTS = "test_gradients_of_adapters_are_the_oracles"
REFERENCE = "test_the_base_is_the_reference_without_a_copy"
SAVED = "test_a_saved_model_is_merged_and_adapters_are_saved_as_they_are"
RESUMES = "test_training_of_adapters_goes_on_to_the_bit"
ALL_LINEAR = "test_all_linear_adapts_every_linear_layer_but_the_head"
GENERATES = "test_generation_has_the_adapters"


def _after_building(change: Any) -> Any:
    """Call `change(worker)` after `build`, when the model has its adapters."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def build(self, *, init_optimizer: bool) -> None:
                super().build(init_optimizer=init_optimizer)
                change(self)

        return Broken

    return break_it


@mutant("lora_scale_forgotten", "The adapters' output is not scaled by alpha / rank.", TWENTY, GRADIENTS, SAVED)
@in_engine
def scale_forgotten(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            with _unscaled(self):
                super().build(init_optimizer=init_optimizer)

        def gather_weights(self, names: Any) -> Any:
            with _unscaled(self):
                yield from super().gather_weights(names)

    return Broken


@mutant("lora_all_linear_of_attention", "all-linear adapts the layers of attention only.", ALL_LINEAR)
@in_engine
def all_linear_of_attention(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            engine: Any = self
            lora = engine.config.lora
            if lora is not None and lora.adapts_all_linear:
                lora = lora.model_copy(update={"target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")})
                engine.config = engine.config.model_copy(update={"lora": lora})
            super().build(init_optimizer=init_optimizer)

    return Broken


@contextmanager
def _unscaled(worker: Any) -> Any:
    """Set the scale of the adapters, alpha / rank, to 1 inside the context."""
    config = worker.config
    lora = config.lora.model_copy(update={"alpha": float(config.lora.rank)})
    worker.config = config.model_copy(update={"lora": lora})
    try:
        yield
    finally:
        worker.config = config


def _change_adapters(worker: Any, change: Any) -> None:
    found = dict(worker.gather_adapters(worker.adapter_specs()))
    worker.take_adapters({name: change(name, matrix) for name, matrix in found.items()})


def _initialize_b_randomly(worker: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    _change_adapters(
        worker, lambda name, matrix: torch.randn(matrix.shape, generator=generator) if ".lora_B." in name else matrix
    )


b_not_zero = mutant(
    "lora_b_not_zero", "B is initialized randomly, so the initial model differs from its base.", REFERENCE
)(_after_building(_initialize_b_randomly))


def _initialize_a_by_rank(worker: Any) -> None:
    generator = torch.Generator().manual_seed(100 + worker.context.rank)
    _change_adapters(
        worker, lambda name, matrix: torch.randn(matrix.shape, generator=generator) if ".lora_A." in name else matrix
    )


a_by_rank = mutant(
    "lora_a_by_rank", "Each rank initializes A from a generator of its own.", REFERENCE, layout=Layout(data=2)
)(_after_building(_initialize_a_by_rank))


def _train_the_base(worker: Any) -> None:
    norms = [parameter for parameter in module_of(worker).parameters() if parameter.ndim == 1]
    for norm in norms:
        norm.requires_grad_(True)
    optimizer_of(worker).add_param_group({"params": norms})


base_trained = mutant(
    "lora_trains_the_base", "The norms of the base model are trained along with the adapters.", TWENTY, GRADIENTS
)(_after_building(_train_the_base))


@mutant("lora_decays_the_base", "Weight decay shrinks the frozen weights too.", TWENTY)
@in_engine
def decays_the_base(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
            done = super().clip_and_step(max_grad_norm, lr)
            factor = 1 - lr * self.config.optimizer.weight_decay
            weights = self.snapshot()
            self.restore({name: weight if is_adapter(name) else weight * factor for name, weight in weights.items()})
            return done

    return Broken


@mutant("lora_a_not_trained", "A keeps its initial value.", GRADIENTS, TWENTY)
@in_engine
def a_not_trained(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
            before = {name: matrix.clone() for name, matrix in self.gather_adapters(self.adapter_specs())}
            done = super().clip_and_step(max_grad_norm, lr)
            _change_adapters(self, lambda name, matrix: before[name] if ".lora_A." in name else matrix)
            return done

    return Broken


@mutant("lora_on_in_reference", "Adapters stay on while the reference model is scored.", REFERENCE)
@in_engine
def on_in_reference(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        @contextmanager
        def without_adapters(self) -> Any:
            yield

    return Broken


@mutant("lora_off_after_reference", "Adapters stay off after the reference model is scored.", REFERENCE)
@in_engine
def off_after_reference(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            self.disabled = ExitStack()
            super().build(init_optimizer=init_optimizer)

        @contextmanager
        def without_adapters(self) -> Any:
            self.disabled.enter_context(super().without_adapters())
            yield

        def close(self) -> None:
            self.disabled.close()
            super().close()

    return Broken


@mutant(
    "lora_frozen_after_reference", "The optimizer loses the adapters after the reference model is scored.", REFERENCE
)
@in_engine
def frozen_after_reference(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        @contextmanager
        def without_adapters(self) -> Any:
            with super().without_adapters():
                yield
            for group in optimizer_of(self).param_groups:
                group["params"] = []

    return Broken


@mutant("lora_copies_the_reference", "A copy of the base is kept for the reference model.", REFERENCE)
def copies_the_reference(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.scoring.reference = SnapshotReference(self.engine)

    return Broken


def _broken_merge(change: Any) -> Any:
    """Break merging: merged weights become `base + change(merged - base)`."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def gather_weights(self, names: Any) -> Any:
                names = list(names)
                with self.without_adapters():
                    base = {name: weight.clone() for name, weight in super().gather_weights(names)}
                for name, weight in super().gather_weights(names):
                    yield name, base[name] + change(weight - base[name])

        return Broken

    return break_it


merged_with_the_wrong_sign = mutant("lora_merged_with_the_wrong_sign", "Merging subtracts the adapters.", SAVED)(
    _broken_merge(lambda added: -added)
)


def _transposed(added: Tensor) -> Tensor:
    return added.T if added.ndim == 2 and added.shape[0] == added.shape[1] else added


merged_transposed = mutant("lora_merged_transposed", "Square layers are merged with (B A) transposed.", SAVED)(
    _broken_merge(_transposed)
)
not_merged = mutant("lora_not_merged", "The base model is saved without the adapters.", SAVED)(
    _broken_merge(torch.zeros_like)
)


def _broken_adapters(change: Any) -> Any:
    """Break `gather_adapters`: each matrix becomes `change(matrix)`."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def gather_adapters(self, names: Any) -> Any:
                for name, matrix in super().gather_adapters(names):
                    yield name, change(matrix)

        return Broken

    return break_it


adapters_not_saved = mutant("lora_adapters_not_saved", "The adapter files contain zeros.", SAVED, GRADIENTS)(
    _broken_adapters(torch.zeros_like)
)
adapters_in_bfloat16 = mutant("lora_adapters_in_bfloat16", "Adapters are saved in bfloat16.", SAVED, RESUMES)(
    _broken_adapters(to_bfloat16)
)


@mutant("lora_misfits_taken", "Adapters that do not fit the model are silently skipped.", SAVED)
def misfits_taken(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def load_adapter(self, path: str) -> None:
            try:
                super().load_adapter(path)
            except DataError:
                return

    return Broken


@mutant("lora_checkpoint_without_moments", "Resuming drops the optimizer moments of the adapters.", RESUMES)
@in_engine
def checkpoint_without_moments(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def load_moments(self, moments: Any) -> None:
            return

    return Broken


@mutant("lora_checkpoint_with_the_base", "Each checkpoint contains the base model too.", RESUMES)
def checkpoint_with_the_base(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def save_checkpoint(self, weights_path: str, *args: Any, **kwargs: Any) -> None:
            from safetensors.torch import save_file

            super().save_checkpoint(weights_path, *args, **kwargs)
            save_file(dict(self.engine.gather_weights(self.engine.weight_specs())), f"{weights_path}/base.safetensors")

    return Broken


@mutant("lora_generates_with_the_base", "Samples are drawn from the base model without the adapters.", GENERATES)
def generates_with_the_base(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def exchange(self, *args: Any, **kwargs: Any) -> Any:
            with self.engine.without_adapters():
                return super().exchange(*args, **kwargs)

    return Broken
