"""The weights of a transformers model in training: as shards, whole, and with LoRA's adapters of peft.

`ModelState` has the weights and moments by the names of the model's files, for refits, saving and checkpoints. A
backend says how it shards a tensor; `FileLayout` says which weights of files a tensor has.

peft wraps each adapted linear layer in its own layer class, with the parameters `LAYER.base_layer`,
`LAYER.lora_A.default` and `LAYER.lora_B.default`; files and refits use their external names, `LAYER.weight`,
`LAYER.lora_A.weight` and `LAYER.lora_B.weight`. peft is imported only when LoRA is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.base.errors import ConfigError
from rlframework.config.policy import LoraConfig
from rlframework.models.file_weights import ADAPTER, FileLayout, FileWeight, external_name, gathered
from rlframework.models.loading import modules_of_part
from rlframework.policy.engine import Engine, Moments, ShardedState, TensorShard, WeightSpec, no_adapters
from rlframework.policy.lora_math import A, B, initial_a, is_adapter, merge
from rlframework.policy.profiling import GATHER, trace_span
from rlframework.policy.tensor_shards import fill_moments, fill_weights, steps_of


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


class ModelState(ModelAdapters, ABC):
    """The primitives of `Engine` that read and write weights and moments.

    Shards share the memory that is trained. `parts`: the weights in files that the tensor or parameter consists of.
    """

    _layout: FileLayout

    # -- specific to a backend ----------------------------------------------------------------------------------------

    @abstractmethod
    def _trained(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters that the optimizer updates, by external name; empty without an optimizer."""

    @abstractmethod
    def _weight_shards(self, tensor: Tensor, parts: Sequence[FileWeight]) -> Iterator[TensorShard]:
        """Yield this rank's shards of one of `_named_tensors`."""

    @abstractmethod
    def _moment_shards(self, parameter: nn.Parameter, parts: Sequence[FileWeight]) -> Iterator[TensorShard]:
        """Yield this rank's shards of the moments of `parameter`, which are zeros before the first step."""

    @abstractmethod
    def _steps(self, parameter: nn.Parameter) -> int | None:
        """Return the number of optimizer steps of `parameter`; None if this rank has no shard of it."""

    @abstractmethod
    def _create_moments(self, steps: Mapping[nn.Parameter, int]) -> None:
        """Create the optimizer's state of all trained parameters, which have taken `steps`. Not collective."""

    @abstractmethod
    def _whole_moments(self, parameter: nn.Parameter) -> Moments:
        """Gather the moments of `parameter`. Collective."""

    # -- common to all ------------------------------------------------------------------------------------------------

    def _weights(self) -> dict[str, Tensor]:
        """Return the saved tensors, without adapters."""
        return {name: tensor for name, tensor in self._named_tensors().items() if not is_adapter(name)}

    def weight_specs(self) -> dict[str, WeightSpec]:
        """See `Engine.weight_specs`."""
        weights, parts = self._weights(), self._layout.weights.items()
        return {name: WeightSpec(part.shape, self._spec(weights[part.source]).dtype) for name, part in parts}

    def gather_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.gather_weights`."""
        tensors = self._named_tensors()

        def gather(name: str) -> Tensor:
            with trace_span(GATHER):
                return self._merged(name, tensors)

        yield from gathered(names, self._layout.weights, gather)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `Engine.load_weights`."""
        for name, tensor in self._weights().items():
            fill_weights(self._weight_shards(tensor, self._layout.by_source[name]), weights)

    def gather_moments(self) -> Iterator[tuple[str, Moments]]:
        """See `Engine.gather_moments`."""
        for name, parameter in self._trained().items():
            whole = self._whole_moments(parameter)
            first, second = whole.exp_avg, whole.exp_avg_sq
            for part in self._layout.by_source[name]:
                yield part.name, Moments(whole.steps, part.of(first), part.of(second) if second.numel() else second)

    def load_moments(self, moments: Mapping[str, Moments]) -> None:
        """See `Engine.load_moments`."""
        trained, parts = self._trained(), self._layout.by_source
        self._create_moments(
            {one: steps_of(moments, [part.name for part in parts[name]]) for name, one in trained.items()}
        )
        for name, parameter in trained.items():
            fill_moments(self._moment_shards(parameter, parts[name]), moments)

    def sharded_state(self) -> ShardedState:
        """See `Engine.sharded_state`."""
        trained, parts = self._trained(), self._layout.by_source
        return ShardedState(
            [shard for name, one in self._weights().items() for shard in self._weight_shards(one, parts[name])],
            [shard for name, one in trained.items() for shard in self._moment_shards(one, parts[name])],
            {
                part.name: steps
                for name, one in trained.items()
                if (steps := self._steps(one)) is not None
                for part in parts[name]
            },
        )
