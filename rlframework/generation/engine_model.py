"""A module of the engine's own, for weights from elsewhere: a trainer whose module is sharded, or another process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlframework.errors import DataError, UserError
from rlframework.generation.adapted_model import AdaptedModel
from rlframework.huggingface.model_directories import quiet_transformers
from rlframework.models.file_names import file_tensors
from rlframework.policy.lora_math import is_adapter
from rlframework.weight_sync.buffers import Info
from rlframework.weight_sync.receiver import CollectingSink, WeightSink
from rlframework.weight_sync.shared_memory import SharedMemory, move_in

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class OwnModel:
    """Built from the model's configuration at the first `load`; later loads copy into it where names allow."""

    def __init__(self, model_name: str, device: str, precision: str) -> None:
        self._model_name, self._device, self._dtype = model_name, torch.device(device), _DTYPES[precision]
        self._module: nn.Module | None = None
        self._names: frozenset[str] = frozenset()
        self._adapted: AdaptedModel | None = None
        self._memory: WeakKeyDictionary[nn.Module, SharedMemory] = WeakKeyDictionary()

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> nn.Module:
        """The module with `weights`, by the names that `save_pretrained` writes, in evaluation mode.

        Names that are missing or unknown, or shapes that differ, are a `UserError`, and the module is given up.
        `weights` is read to its end in any case: it may be a collective.
        """
        stream = iter(weights)
        current, self._module = self._module, None
        try:
            if current is not None and self._names <= set(file_tensors(current)):
                self._copy(current, stream)
            else:
                current = self._build(stream)
        finally:
            for _ in stream:
                pass
        self._module = current
        return current

    def sink(self, info: Info, ready: Callable[[nn.Module], None]) -> WeightSink:
        """Where the weights `info` of a refit go; `ready` is called with the module when all are there.

        Straight into the module that is there, where names, shapes and dtypes are its own; else they are kept until all
        are there, and loaded. A module that was filled in part is of no use before the next refit.
        """
        if all(map(is_adapter, info)):
            adapted = self._adapted = self._adapted or AdaptedModel(self._model_name, self._device, self._dtype)
            return CollectingSink(info, self._device, lambda adapters: ready(adapted.load(adapters)))
        current = self._module
        if current is not None and self._names == set(info):
            targets = file_tensors(current)
            if all(_takes(targets.get(name), shape, dtype) for name, (shape, dtype) in info.items()):
                return _InPlace(self, current, targets, ready)
        return CollectingSink(info, self._device, lambda weights: ready(self.load(weights)))

    def memory(self, module: nn.Module) -> SharedMemory | None:
        """What the parameters of `module` and its buffers that are saved lie in, from now on; None on a GPU."""
        if self._device.type != "cpu":
            return None
        memory = self._memory.get(module)
        if memory is None or not all(map(memory.holds, _saved(module))):
            self._memory[module] = memory = move_in(_saved(module))
        return memory

    @torch.no_grad()
    def _copy(self, module: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> None:
        """In place, one tensor at a time. Tied weights are one tensor, so their one name fills all."""
        targets, seen = file_tensors(module), set()
        for name, tensor in weights:
            if name not in self._names:
                self._refuse(set(), {name}, set())
            if targets[name].shape != tensor.shape:
                self._refuse(set(), set(), {name})
            targets[name].copy_(tensor)
            seen.add(name)
        if seen != self._names:
            self._refuse(set(self._names - seen), set(), set())

    def _build(self, weights: Iterator[tuple[str, Tensor]]) -> nn.Module:
        """Through transformers' own loading, which knows the architectures whose files and modules have other names."""
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
        self._refuse(set(info["missing_keys"]), set(info["unexpected_keys"]), mismatched)
        self._names = frozenset(given)
        placed: nn.Module = module.to(self._device).eval()
        return placed

    def _refuse(self, missing: set[str], unexpected: set[str], mismatched: set[str]) -> None:
        parts = [
            f"{what}: {', '.join(sorted(names)[:8])}{' and more' if len(names) > 8 else ''}"
            for what, names in (("missing", missing), ("unknown", unexpected), ("of another shape", mismatched))
            if names
        ]
        if parts:
            raise UserError(
                f"the weights do not fit the model {self._model_name!r} ({'; '.join(parts)}); give all weights by the "
                "names that save_pretrained writes, tied heads once"
            )


class _InPlace(WeightSink):
    """A module's own tensors as the place for weights."""

    def __init__(
        self, owner: OwnModel, module: nn.Module, targets: Mapping[str, Tensor], ready: Callable[[nn.Module], None]
    ) -> None:
        self._owner, self._module, self._targets, self._ready = owner, module, targets, ready

    def room(self, name: str) -> Tensor:
        """See `WeightSink.room`."""
        return self._targets[name]

    def memory(self) -> SharedMemory | None:
        """See `WeightSink.memory`: the module's own."""
        memory = self._owner.memory(self._module)
        self._targets = file_tensors(self._module)
        return memory

    def finish(self) -> None:
        """See `WeightSink.finish`."""
        self._ready(self._module)


def _saved(module: nn.Module) -> Iterator[Tensor]:
    """The module's own parameters and buffers that it saves."""
    saved = module.state_dict().keys()
    yield from (parameter for name, parameter in module.named_parameters() if name in saved)
    yield from (buffer for name, buffer in module.named_buffers() if name in saved)


def _takes(target: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a weight can be copied into `target` byte by byte."""
    return target is not None and target.is_contiguous() and (tuple(target.shape), target.dtype) == (shape, dtype)
