"""LoRA with peft: inject adapters into a transformers model, initialize them, and map their names.

peft wraps each adapted linear layer in its own layer class, with the parameters `LAYER.base_layer`,
`LAYER.lora_A.default` and `LAYER.lora_B.default`; files and refits use their external names, `LAYER.weight`,
`LAYER.lora_A.weight` and `LAYER.lora_B.weight`. peft is imported only when LoRA is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.base.errors import ConfigError
from rlframework.config.policy import LoraConfig
from rlframework.models.file_weights import ADAPTER, external_name
from rlframework.models.loading import modules_of_part
from rlframework.policy.engine import Engine, WeightSpec, no_adapters
from rlframework.policy.lora_math import A, B, initial_a, is_adapter, merge


def inject(model: Any, lora: LoraConfig) -> None:
    """Add adapters to the layers that `lora` names, in place, and freeze all other parameters.

    The adapters stay on the meta device until `initialize`. Raises like `adapted_layers`.
    """
    import peft

    layers = adapted_layers(model, lora)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # floats work too
        lora_dropout=0.0,
        target_modules=list(lora.target_modules) if lora.selects_by_name else layers,
        bias="none",
        init_lora_weights=False,
    )
    peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    freeze(model)


def adapted_layers(model: Any, lora: LoraConfig) -> list[str]:
    """The paths of the layers of `model`, which may be on the meta device, that `lora` selects.

    Raises `ConfigError` for a name that matches no linear layer, or matches an embedding or the head.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = _names_in_part(model, lora.part)
    linear = {name for name, one in model.named_modules() if isinstance(one, nn.Linear) and one not in ends}
    chosen: set[str] = set()
    for target in lora.target_modules:
        matches = {name for name in names if f".{name}".endswith(f".{target}")}
        if lora.adapts_all_linear:
            matches = linear.intersection(names)
        if not matches or matches - linear:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
            raise ConfigError(
                f"policy.lora.target_modules names {target!r}, which is not a linear layer of {type(model).__name__}; "
                f"layers that can have adapters: {known}"
            )
        chosen |= matches
    return sorted(chosen)


def _names_in_part(model: Any, part: str) -> list[str]:
    """The names of the modules of `part` of a vision-language model, or of "all"."""
    if part == "all":
        return [name for name, _ in model.named_modules() if name]
    inside = {id(one) for module in modules_of_part(model, part) for one in module.modules()}
    return [name for name, module in model.named_modules() if id(module) in inside]


def freeze(model: nn.Module) -> None:
    """Freeze all parameters of `model` but the adapters. Repeat after sharding, which replaces the parameters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(external_name(name)))


def layers_of(model: nn.Module) -> dict[str, Any]:
    """Return the layers with adapters by path; empty without LoRA."""
    # recognized by attribute: peft's class is not imported without LoRA
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@torch.no_grad()
def initialize(model: nn.Module, lora: LoraConfig, write: Callable[[Tensor, Tensor], None]) -> None:
    """Initialize the adapters of `model`, sharded or not: A from its name and the seed, B with zeros. No collective.

    `write(parameter, value)` writes this rank's shard of a full value.
    """
    for layer, module in layers_of(model).items():
        for projection in (module.lora_A[ADAPTER], module.lora_B[ADAPTER]):
            if projection.weight.is_meta:
                projection.to_empty(device=module.base_layer.weight.device)
        a = module.lora_A[ADAPTER].weight
        write(a, initial_a(layer + A, tuple(a.shape), lora.seed))
        module.lora_B[ADAPTER].weight.zero_()


class ModelAdapters(Engine, ABC):
    """The primitives of `Engine` that concern adapters, for a `model` that went through `inject`."""

    model: Any

    @abstractmethod
    def _named_tensors(self) -> dict[str, Tensor]:
        """Return the sharded weights and adapters by external name."""

    @abstractmethod
    def _gather_tensor(self, tensor: Tensor) -> Tensor:
        """Return the full tensor of one of `_named_tensors`. Collective."""

    @abstractmethod
    def _write_tensor(self, tensor: Tensor, value: Tensor) -> None:
        """Write this rank's shard of the full `value` into one of `_named_tensors`, in place. No collective."""

    def _spec(self, tensor: Tensor) -> WeightSpec:
        """Return the spec of the full tensor of one of `_named_tensors`."""
        return WeightSpec(tuple(tensor.shape), tensor.dtype)

    def _adapters(self) -> dict[str, Tensor]:
        if self.config.lora is None:
            raise no_adapters(self)
        return {name: tensor for name, tensor in self._named_tensors().items() if is_adapter(name)}

    def adapter_specs(self) -> dict[str, WeightSpec]:
        """See `Engine.adapter_specs`."""
        return {name: self._spec(tensor) for name, tensor in self._adapters().items()}

    def gather_adapters(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.gather_adapters`."""
        adapters = self._adapters()
        for name in names:
            yield name, self._gather_tensor(adapters[name])

    @torch.no_grad()
    def take_adapters(self, adapters: Mapping[str, Tensor]) -> None:
        """See `Engine.take_adapters`."""
        for name, tensor in self._adapters().items():
            self._write_tensor(tensor, adapters[name])

    def enable_adapters(self, enabled: bool) -> None:
        """See `Engine.enable_adapters`."""
        self._adapters()  # releases gathered parameters: peft sets flags on the parameters, which are the sharded ones
        for layer in layers_of(self.model).values():
            layer.enable_adapters(enabled)

    @torch.no_grad()
    def _merged(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the full weight `name` of `tensors`, merged with its adapter if it has an enabled one. Collective."""
        weight, layer = self._gather_tensor(tensors[name]), name.removesuffix(".weight")
        if self.config.lora is None or self.adapters_disabled or layer + A not in tensors:
            return weight
        return merge(
            weight,
            self._gather_tensor(tensors[layer + A]),
            self._gather_tensor(tensors[layer + B]),
            self.config.lora.scale,
        )
