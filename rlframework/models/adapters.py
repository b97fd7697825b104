"""LoRA with peft: adapters in a model of transformers, their first values, and names as outside.

peft puts a layer of its own around each linear layer that is adapted: `LAYER.base_layer`, `LAYER.lora_A.default` and
`LAYER.lora_B.default`. An engine splits the three like any other; outside they are called
`LAYER.weight`, `LAYER.lora_A.weight` and `LAYER.lora_B.weight`. peft is imported where there are adapters only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.config.policy import LoraConfig
from rlframework.errors import ConfigError
from rlframework.policy.lora import Adapters
from rlframework.policy.lora_math import A, B, initial_a, is_adapter, merge
from rlframework.policy.model_state import WeightSpec

ADAPTER = "default"
"""peft's name of the only adapter."""


def inject(model: Any, lora: LoraConfig) -> None:
    """Put adapters around the layers that `lora` names, in place; nothing but them has a gradient afterwards.

    They are on the meta device until `initialize`. A `ConfigError` where a name is of no linear layer, or of the head.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    _require_layers(model, lora)
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # a float is as good
        lora_dropout=0.0,
        target_modules=list(lora.target_modules),
        bias="none",
        init_lora_weights=False,
    )
    inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    freeze(model)


def freeze(model: nn.Module) -> None:
    """Nothing but the adapters of `model` has a gradient. Again after splitting, which makes parameters anew."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_inside(name))


def _require_layers(model: Any, lora: LoraConfig) -> None:
    names = {name: module for name, module in model.named_modules() if name}
    wanted = {
        target: [name for name in names if name == target or name.endswith(f".{target}")]
        for target in lora.target_modules
    }
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    linear = {name for name, module in names.items() if isinstance(module, nn.Linear) and module not in ends}
    for target, found in wanted.items():
        if not found or set(found) - linear:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
            raise ConfigError(
                f"policy.lora.target_modules names {target!r}, which is no linear layer of {type(model).__name__}; "
                f"those that adapters can be put around: {known}"
            )
    if not wanted:
        raise ConfigError("policy.lora.target_modules is empty: there would be nothing to train")


def layers_of(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters by their paths; none where there is no LoRA."""
    # not by peft's class: without LoRA it is not imported
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@torch.no_grad()
def initialize(model: nn.Module, lora: LoraConfig, put: Callable[[Tensor, Tensor], None]) -> None:
    """Give the adapters of `model`, split or not, their first values: A by name and seed, B zeros. No collective.

    `put(parameter, value)` writes this rank's part of a whole value.
    """
    for layer, module in layers_of(model).items():
        for part in (module.lora_A[ADAPTER], module.lora_B[ADAPTER]):
            if part.weight.is_meta:
                part.to_empty(device=module.base_layer.weight.device)
        a = module.lora_A[ADAPTER].weight
        put(a, initial_a(layer + A, tuple(a.shape), lora.seed))
        module.lora_B[ADAPTER].weight.zero_()


def is_inside(name: str) -> bool:
    """Whether a parameter of the model is an adapter's, by its name in the model."""
    return f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name


def outside(name: str) -> str:
    """What a parameter or buffer of the model is called outside."""
    if is_inside(name):
        return name.replace(f".{ADAPTER}.", ".")
    return name.replace(".base_layer.", ".")


def switch(model: nn.Module, *, on: bool) -> None:
    """The layers of `model` are adapted, or those of its base.

    peft sets flags on the parameters too, so an engine must have let go of gathered ones: those of the pieces count.
    """
    for layer in layers_of(model).values():
        layer.enable_adapters(on)


class ModelAdapters(Adapters, ABC):
    """The primitives of `rlframework.policy.lora.Adapters`, for a worker with a model of `inject`."""

    model: Any
    _bare: bool = False
    """Whether the adapters are switched off just now."""

    @abstractmethod
    def _held(self) -> dict[str, Tensor]:
        """Weights and adapters by the names outside, in pieces."""

    @abstractmethod
    def _whole(self, tensor: Tensor) -> Tensor:
        """All of one of them. Collective."""

    @abstractmethod
    def _put(self, tensor: Tensor, value: Tensor) -> None:
        """Write this rank's part of the whole `value` into one of them, in place. No collective."""

    def _adapters(self) -> dict[str, Tensor]:
        if self.config.lora is None:
            self._no_adapters()
        return {name: tensor for name, tensor in self._held().items() if is_adapter(name)}

    def adapter_specs(self) -> dict[str, WeightSpec]:
        """See `Adapters.adapter_specs`."""
        return {name: WeightSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in self._adapters().items()}

    def gather_adapters(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Adapters.gather_adapters`."""
        adapters = self._adapters()
        for name in names:
            yield name, self._whole(adapters[name])

    @torch.no_grad()
    def take_adapters(self, adapters: Mapping[str, Tensor]) -> None:
        """See `Adapters.take_adapters`."""
        for name, tensor in self._adapters().items():
            self._put(tensor, adapters[name])

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """See `Adapters.without_adapters`."""
        if self._bare:
            yield
            return
        self._adapters()  # lets go of gathered parameters, and so it does below
        try:
            self._bare = True
            switch(self.model, on=False)
            yield
        finally:
            self._adapters()
            switch(self.model, on=True)
            self._bare = False

    @torch.no_grad()
    def _merged(self, name: str, held: Mapping[str, Tensor]) -> Tensor:
        """The whole weight `name` of `held` with its adapter, where it has one that is on. Collective."""
        weight, layer = self._whole(held[name]), name.removesuffix(".weight")
        if self.config.lora is None or self._bare or layer + A not in held:
            return weight
        return merge(weight, self._whole(held[layer + A]), self._whole(held[layer + B]), self.config.lora.scale)
