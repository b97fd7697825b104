"""The engine's own module, for weights that come from a trainer with a sharded module or from another process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlframework.errors import DataError, UserError
from rlframework.huggingface.model_directories import quiet_transformers
from rlframework.models.file_names import file_tensors
from rlframework.policy.all_ranks import exhausting
from rlframework.policy.lora_math import A, B, is_adapter, merge
from rlframework.weight_sync.buffers import WeightInfo
from rlframework.weight_sync.receiver import CollectingSink, WeightSink
from rlframework.weight_sync.shared_memory import SharedMemory, move_to_shared_memory


class AdaptedModel:
    """The base model from `model_name` merged with the latest adapters, for refits that transfer only these.

    Keeps fp32 CPU copies of adapted weights. Not supported: sampling with several adapters at the same time.
    """

    def __init__(self, model_name: str, device: torch.device, dtype: torch.dtype) -> None:
        self._model_name, self._device, self._dtype = model_name, device, dtype
        self._module: nn.Module | None = None
        self._base: dict[str, Tensor] = {}

    @torch.no_grad()
    def load(self, adapters: Iterable[tuple[str, Tensor]]) -> nn.Module:
        """Merge `adapters`, named as in `Adapters.adapter_specs` with the scale included in B, and return the module.

        Raises `UserError` if the base model has no such layers. Each weight is merged in fp32 and then rounded, as in
        the trainer, so the engine's weights equal those after a refit of merged weights.
        """
        given = dict(adapters)
        layers = {name.removesuffix(A) for name in given if name.endswith(A)}
        module = self._module if self._module is not None and layers == set(self._base) else self._read(layers)
        targets = module.state_dict()
        for layer in sorted(layers):
            merged = merge(self._base[layer].to(self._device), given[layer + A], given[layer + B], 1.0)
            targets[f"{layer}.weight"].copy_(merged)
        self._module = module
        return module

    def _read(self, layers: set[str]) -> nn.Module:
        from transformers import AutoModelForCausalLM

        self._module = None
        try:
            with quiet_transformers():
                module: Any = AutoModelForCausalLM.from_pretrained(self._model_name, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise DataError(
                f"policy.model_name={self._model_name!r} cannot be read by the generation engine, as "
                f"policy.lora.refit=adapters requires; set policy.lora.refit to merged ({error})"
            ) from error
        weights = module.state_dict()
        if unknown := sorted(layer for layer in layers if f"{layer}.weight" not in weights):
            raise UserError(
                f"received adapters for layers {unknown[:3]}, which the model {self._model_name!r} does not have"
            )
        self._base = {layer: weights[f"{layer}.weight"].clone() for layer in layers}
        placed: nn.Module = module.to(self._device, self._dtype).eval()
        return placed


class EngineModel:
    """A module built from the model's configuration at the first `load`; later loads copy into it if names match."""

    def __init__(self, model_name: str, device: str, precision: str) -> None:
        self._model_name, self._device = model_name, torch.device(device)
        self._dtype: torch.dtype = getattr(torch, precision)
        self._module: nn.Module | None = None
        self._names: frozenset[str] = frozenset()
        self._adapted: AdaptedModel | None = None
        self._memory: WeakKeyDictionary[nn.Module, SharedMemory] = WeakKeyDictionary()

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> nn.Module:
        """Load `weights`, under the names `save_pretrained` writes, and return the module in evaluation mode.

        Missing or unknown names and different shapes raise `UserError`, and the module is dropped. Exhausts `weights`
        in any case, because reading it may be a collective.
        """
        stream = iter(weights)
        current, self._module = self._module, None
        with exhausting(stream):
            if current is not None and self._names <= set(file_tensors(current)):
                self._copy(current, stream)
            else:
                current = self._build(stream)
        self._module = current
        return current

    def sink(self, info: WeightInfo, ready: Callable[[nn.Module], None]) -> WeightSink:
        """Return the destination of a refit with weights `info`; it calls `ready(module)` when complete.

        Weights with the names, shapes and dtypes of the current module are written straight into it; others are
        collected and then loaded. A partly written module is unusable until the next refit.
        """
        if all(map(is_adapter, info)):
            adapted = self._adapted = self._adapted or AdaptedModel(self._model_name, self._device, self._dtype)
            return CollectingSink(info, self._device, lambda adapters: ready(adapted.load(adapters)))
        current = self._module
        if current is not None and self._names == set(info):
            targets = file_tensors(current)
            if all(_accepts(targets.get(name), shape, dtype) for name, (shape, dtype) in info.items()):
                return _InPlace(self, current, targets, ready)
        return CollectingSink(info, self._device, lambda weights: ready(self.load(weights)))

    def memory(self, module: nn.Module) -> SharedMemory | None:
        """Move the parameters and persistent buffers of `module` to shared memory and return it; None on a GPU."""
        if self._device.type != "cpu":
            return None
        memory = self._memory.get(module)
        if memory is None or not all(map(memory.contains, _saved(module))):
            self._memory[module] = memory = move_to_shared_memory(_saved(module))
        return memory

    @torch.no_grad()
    def _copy(self, module: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Copy in place, one tensor at a time. Tied weights share one tensor, so loading it once is enough."""
        targets, seen = file_tensors(module), set()
        for name, tensor in weights:
            if name not in self._names:
                self._require_match(unexpected={name})
            if targets[name].shape != tensor.shape:
                self._require_match(mismatched={name})
            targets[name].copy_(tensor)
            seen.add(name)
        self._require_match(missing=self._names - seen)

    def _build(self, weights: Iterator[tuple[str, Tensor]]) -> nn.Module:
        """Build with transformers' own loading, which maps names that differ between files and modules."""
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.from_pretrained(self._model_name)
        except (OSError, ValueError) as error:
            raise DataError(
                f"no model configuration in {self._model_name!r}: check policy.model_name ({error})"
            ) from error
        given = {name: tensor.detach().to(self._device, self._dtype, copy=True) for name, tensor in weights}
        with quiet_transformers():
            with torch.device("meta"):
                model_class = type(AutoModelForCausalLM.from_config(config))
            module, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=dict(given),
                dtype=self._dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        mismatched = {entry[0] if isinstance(entry, tuple) else entry for entry in info["mismatched_keys"]}
        self._require_match(info["missing_keys"], info["unexpected_keys"], mismatched)
        self._names = frozenset(given)
        placed: nn.Module = module.to(self._device).eval()
        return placed

    def _require_match(
        self, missing: Collection[str] = (), unexpected: Collection[str] = (), mismatched: Collection[str] = ()
    ) -> None:
        mistakes = [
            f"{what}: {', '.join(sorted(names)[:8])}{' and more' if len(names) > 8 else ''}"
            for what, names in (("missing", missing), ("unknown", unexpected), ("with another shape", mismatched))
            if names
        ]
        if mistakes:
            raise UserError(
                f"the weights do not fit the model {self._model_name!r} ({'; '.join(mistakes)}); give all weights "
                "under the names that save_pretrained writes, tied heads once"
            )


class _InPlace(WeightSink):
    """Writes weights straight into a module's own tensors."""

    def __init__(
        self, owner: EngineModel, module: nn.Module, targets: Mapping[str, Tensor], ready: Callable[[nn.Module], None]
    ) -> None:
        self._owner, self._module, self._targets, self._ready = owner, module, targets, ready

    def target(self, name: str) -> Tensor:
        """See `WeightSink.target`."""
        return self._targets[name]

    def memory(self) -> SharedMemory | None:
        """See `WeightSink.memory`."""
        memory = self._owner.memory(self._module)
        self._targets = file_tensors(self._module)
        return memory

    def finish(self) -> None:
        """See `WeightSink.finish`."""
        self._ready(self._module)


def _saved(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers that the module saves."""
    saved = module.state_dict().keys()
    yield from (parameter for name, parameter in module.named_parameters() if name in saved)
    yield from (buffer for name, buffer in module.named_buffers() if name in saved)


def _accepts(target: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return True if a weight of `shape` and `dtype` can be copied into `target` byte by byte."""
    return target is not None and target.is_contiguous() and (tuple(target.shape), target.dtype) == (shape, dtype)
