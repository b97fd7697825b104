"""Bugs of LoRA: the base is trained, adapters are left on or out, or merged, begun and saved wrongly."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from rlframework.conformance.layouts import Layout
from rlframework.conformance.mutants.mutant import mutant
from rlframework.conformance.mutants.policy_worker.engine_access import module_of, optimizer_of, to_bfloat16
from rlframework.errors import DataError
from rlframework.policy.lora_math import is_adapter

TWENTY = "test_twenty_steps_of_adapters_end_at_the_oracles"
GRADIENTS = "test_gradients_of_adapters_are_the_oracles"
REFERENCE = "test_the_base_is_the_reference_without_a_copy"
SAVED = "test_a_saved_model_is_merged_and_adapters_are_saved_as_they_are"
GOES_ON = "test_training_of_adapters_goes_on_to_the_bit"
GENERATES = "test_generation_has_the_adapters"


def _after_building(change: Any) -> Any:
    """A worker that calls `change(worker)` when its model is built, where it has adapters."""

    def break_it(worker_class: Any) -> Any:
        class Broken(worker_class):  # type: ignore[misc]
            def build(self, *, init_optimizer: bool) -> None:
                super().build(init_optimizer=init_optimizer)
                change(self)

        return Broken

    return break_it


@mutant("lora_scale_forgotten", "what adapters add is not multiplied by alpha / rank", TWENTY, GRADIENTS, SAVED)
def scale_forgotten(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            with _unscaled(self):
                super().build(init_optimizer=init_optimizer)

        def gather_weights(self, names: Any) -> Any:
            with _unscaled(self):
                yield from super().gather_weights(names)

    return Broken


@contextmanager
def _unscaled(worker: Any) -> Any:
    """Inside, the worker thinks that its scale is 1."""
    told = worker.config
    worker.config = told.model_copy(update={"lora": told.lora.model_copy(update={"alpha": float(told.lora.rank)})})
    try:
        yield
    finally:
        worker.config = told


def _drawn(worker: Any, change: Any) -> None:
    found = dict(worker.gather_adapters(worker.adapter_specs()))
    worker.take_adapters({name: change(name, matrix) for name, matrix in found.items()})


def _begin_with_b(worker: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    _drawn(
        worker, lambda name, matrix: torch.randn(matrix.shape, generator=generator) if ".lora_B." in name else matrix
    )


b_not_zero = mutant("lora_b_not_zero", "B starts with random numbers, and the model is not its base", REFERENCE)(
    _after_building(_begin_with_b)
)


def _begin_by_the_process(worker: Any) -> None:
    generator = torch.Generator().manual_seed(100 + worker.context.rank)
    _drawn(
        worker, lambda name, matrix: torch.randn(matrix.shape, generator=generator) if ".lora_A." in name else matrix
    )


a_by_rank = mutant(
    "lora_a_by_rank", "each rank draws its part of A from a generator of its own", REFERENCE, layout=Layout(data=2)
)(_after_building(_begin_by_the_process))


def _train_the_base(worker: Any) -> None:
    norms = [parameter for parameter in module_of(worker).parameters() if parameter.ndim == 1]
    for norm in norms:
        norm.requires_grad_(True)
    optimizer_of(worker).add_param_group({"params": norms})


base_trained = mutant(
    "lora_trains_the_base", "the norms of the base are trained beside the adapters", TWENTY, GRADIENTS
)(_after_building(_train_the_base))


@mutant("lora_decays_the_base", "weight decay shrinks the frozen weights too", TWENTY)
def decays_the_base(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
            done = super().clip_and_step(max_grad_norm, lr)
            left = 1 - lr * self.config.optimizer.weight_decay
            held = self.snapshot()
            self.restore({name: weight if is_adapter(name) else weight * left for name, weight in held.items()})
            return done

    return Broken


def _gradients(change: Any) -> Any:
    """A worker that calls `change(name, gradient)` of each gradient before its step."""

    def break_it(worker_class: Any) -> Any:
        class Broken(worker_class):  # type: ignore[misc]
            def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
                for name, parameter in module_of(self).named_parameters():
                    if parameter.grad is not None:
                        change(name, parameter.grad)
                return super().clip_and_step(max_grad_norm, lr)

        return Broken

    return break_it


a_not_trained = mutant("lora_a_not_trained", "A gets no gradient, and stays what it was", GRADIENTS, TWENTY)(
    _gradients(lambda name, gradient: gradient.zero_() if "lora_A" in name else None)
)


@mutant("lora_on_in_reference", "adapters stay on while the reference is asked", REFERENCE)
def on_in_reference(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        @contextmanager
        def without_adapters(self) -> Any:
            yield

    return Broken


@mutant("lora_off_after_reference", "adapters stay off when the reference has been asked", REFERENCE)
def off_after_reference(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            self.left_at_the_end = ExitStack()
            super().build(init_optimizer=init_optimizer)

        @contextmanager
        def without_adapters(self) -> Any:
            self.left_at_the_end.enter_context(super().without_adapters())
            yield

        def close(self) -> None:
            self.left_at_the_end.close()
            super().close()

    return Broken


@mutant("lora_frozen_after_reference", "the optimizer has lost the adapters after the reference", REFERENCE)
def frozen_after_reference(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        @contextmanager
        def without_adapters(self) -> Any:
            with super().without_adapters():
                yield
            for group in optimizer_of(self).param_groups:
                group["params"] = []

    return Broken


@mutant("lora_copies_the_reference", "a copy of the base is kept for the reference", REFERENCE)
def copies_the_reference(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._reference = self.snapshot()

    return Broken


def _merging(change: Any) -> Any:
    """A worker whose merged weights are `base + change(what adapters add)`."""

    def break_it(worker_class: Any) -> Any:
        class Broken(worker_class):  # type: ignore[misc]
            def gather_weights(self, names: Any) -> Any:
                names = list(names)
                with self.without_adapters():
                    base = {name: weight.clone() for name, weight in super().gather_weights(names)}
                for name, weight in super().gather_weights(names):
                    yield name, base[name] + change(weight - base[name])

        return Broken

    return break_it


merged_with_the_wrong_sign = mutant("lora_merged_with_the_wrong_sign", "adapters are subtracted", SAVED)(
    _merging(lambda added: -added)
)


def _turned(added: Tensor) -> Tensor:
    return added.T if added.ndim == 2 and added.shape[0] == added.shape[1] else added


merged_transposed = mutant("lora_merged_transposed", "square layers are merged with (B A) transposed", SAVED)(
    _merging(_turned)
)
not_merged = mutant("lora_not_merged", "what is saved is the base alone", SAVED)(_merging(torch.zeros_like))


def _gathered(change: Any) -> Any:
    """A worker whose adapters, when gathered, are what `change` makes of them."""

    def break_it(worker_class: Any) -> Any:
        class Broken(worker_class):  # type: ignore[misc]
            def gather_adapters(self, names: Any) -> Any:
                for name, matrix in super().gather_adapters(names):
                    yield name, change(matrix)

        return Broken

    return break_it


adapters_not_saved = mutant("lora_adapters_not_saved", "the files hold zeros", SAVED, GRADIENTS)(
    _gathered(torch.zeros_like)
)
adapters_in_bfloat16 = mutant("lora_adapters_in_bfloat16", "adapters are saved in bfloat16", SAVED, GOES_ON)(
    _gathered(to_bfloat16)
)


@mutant("lora_misfits_taken", "adapters that do not fit are left out without a word", SAVED)
def misfits_taken(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def load_adapter(self, path: str) -> None:
            try:
                super().load_adapter(path)
            except DataError:
                return

    return Broken


@mutant("lora_checkpoint_without_moments", "adapters go on without their moments", GOES_ON)
def checkpoint_without_moments(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def load_moments(self, moments: Any) -> None:
            return

    return Broken


@mutant("lora_checkpoint_with_the_base", "each checkpoint holds the base too", GOES_ON)
def checkpoint_with_the_base(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def _write_trained(self, path: str) -> None:
            super()._write_trained(path)
            if self.config.lora is not None:
                from safetensors.torch import save_file

                save_file(dict(self.gather_weights(self.weight_specs())), f"{path}/base.safetensors")

    return Broken


@mutant("lora_generates_with_the_base", "samples are drawn from the base", GENERATES)
def generates_with_the_base(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            with self.without_adapters():
                return super().generate(*args, **kwargs)

    return Broken
