"""The `Engine` primitives for weights, adapters and moments, under Hugging Face names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlframework.base.errors import DataError
from rlframework.engine import (
    Engine,
    FileLayout,
    ModelFiles,
    Moments,
    ShardedState,
    WeightSpec,
    auto_class,
    new_head_hint,
    no_adapters,
    slice_of,
)
from rlframework_megatron import moments as moments_of
from rlframework_megatron import native
from rlframework_megatron import weights as weights_of
from rlframework_megatron.fused_lora import enable_adapters, gather_merged, initial
from rlframework_megatron.names import gives_scores
from rlframework_megatron.weights import LocalModel


def load_from_folder(local_model: LocalModel, folder: str | Path, new: Collection[str] = ()) -> None:
    """Load the parameters, and the optimizer's fp32 copies of them, from the safetensors files in `folder`.

    `new`: weights that begin at zeros. Call after creating the optimizer. Each rank reads only its own shards.
    Quantised files and other formats are rejected, because reading them requires a whole model in each process.
    """
    config = local_model.config
    if getattr(config, "quantization_config", None):
        raise DataError(f"the weights in {folder} are quantised; the megatron backend reads unquantised weights only")
    head = "score" if gives_scores(config) else "language"
    with torch.device("meta"):
        model = auto_class(config, head).from_config(config)
        layout = FileLayout.of(model)
    weights = {name: layout.weights[name] for name in local_model.weights}
    files = ModelFiles(Path(folder), weights, "model.", layout.other_names, new=new)
    if hint := new_head_hint(files.missing):
        raise DataError(f"{folder} lacks {files.missing[0]}{hint}")
    if files.missing:
        raise DataError(
            f"{folder} has no {files.missing[0]}: its files do not belong to the model in its config.json, or use "
            "other weight names. Load it with transformers, save it with save_pretrained, and use the result"
        )
    files.require_used(model, config, head)
    weights_of.load(local_model, files.read_slice)


class ModelState(Engine, ABC):
    """`Engine` primitives for weights and moments; a worker sets `_local_model` and `_local_adapters` in `build`."""

    _local_model: LocalModel
    _local_adapters: LocalModel | None
    """The adapters of the model as weights of their own; None without LoRA."""

    @abstractmethod
    def _megatron(self) -> AbstractContextManager[None]:
        """The context for every use of megatron-core."""

    @abstractmethod
    def _finish_param_gather(self) -> None:
        """Gather updated weights that are still on other ranks. Collective if there are any."""

    def _onload_weights(self) -> None:
        """Onload weights that are in CPU memory. Not collective."""
        self.move(self._local_model.groups.device, model=True)

    def _current_model(self) -> LocalModel:
        """The local model with all weights of the last step, onloaded. Collective."""
        self._onload_weights()
        self._finish_param_gather()
        return self._local_model

    def weight_specs(self) -> dict[str, WeightSpec]:
        """See `Engine.weight_specs`."""
        return weights_of.weight_specs(self._local_model.config)

    def gather_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.gather_weights`."""
        local_model = self._current_model()
        if self._local_adapters is None or self.adapters_disabled:
            return weights_of.gather_weights(local_model, names)
        assert self.config.lora is not None
        return gather_merged(local_model, self._local_adapters, names, self.config.lora.scale)

    def snapshot(self) -> dict[str, Tensor]:
        """See `Engine.snapshot`."""
        return weights_of.snapshot(self._current_model())

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """See `Engine.restore`."""
        self._onload_weights()
        weights_of.restore(self._local_model, snapshot)

    def mix(self, snapshot: dict[str, Tensor], other: Mapping[str, Tensor], alpha: float) -> None:
        """See `Engine.mix`; parameters of which this rank updates a part are rounded from the mixed fp32 shards."""
        super().mix(snapshot, other, alpha)
        if weights_of.has_partial_shards(self._local_model):
            current = self.snapshot()
            self.restore(snapshot)
            weights_of.round_parameters(self._local_model)
            snapshot.update(self.snapshot())
            self.restore(current)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `Engine.load_weights`."""
        self._onload_weights()
        weights_of.load_weights(self._local_model, weights)

    def gather_moments(self) -> Iterator[tuple[str, Moments]]:
        """See `Engine.gather_moments`."""
        return moments_of.gather_moments(self._trained)

    def load_moments(self, moments: Mapping[str, Moments]) -> None:
        """See `Engine.load_moments`."""
        moments_of.load_moments(self._trained, moments)

    @property
    def _trained(self) -> LocalModel:
        """The model, or its adapters: those weights that the optimizer updates."""
        return self._local_model if self._local_adapters is None else self._local_adapters

    def sharded_state(self) -> ShardedState:
        """See `Engine.sharded_state`."""
        return moments_of.sharded_state(self._current_model())

    def save_native(self, folder: Path, *, optimizer: bool) -> None:
        """See `Engine.save_native`."""
        local_model = self._current_model()
        with self._megatron():
            native.save(local_model, folder, optimizer=optimizer)

    def load_native(self, folder: Path, *, optimizer: bool) -> None:
        """See `Engine.load_native`."""
        local_model = self._current_model()
        with self._megatron():
            native.load(local_model, folder, optimizer=optimizer)

    # -- LoRA ---------------------------------------------------------------------------------------------------------

    def _adapters(self) -> LocalModel:
        if self._local_adapters is None:
            raise no_adapters(self)
        self._current_model()
        return self._local_adapters

    def adapter_specs(self) -> dict[str, WeightSpec]:
        """See `Engine.adapter_specs`."""
        if self._local_adapters is None:
            raise no_adapters(self)
        return {name: WeightSpec(one.shape, torch.float32) for name, one in self._local_adapters.weights.items()}

    def gather_adapters(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.gather_adapters`."""
        return weights_of.gather_weights(self._adapters(), names)

    def take_adapters(self, adapters: Mapping[str, Tensor]) -> None:
        """See `Engine.take_adapters`."""
        weights_of.load(self._adapters(), partial(slice_of, adapters))

    def _initialize_adapters(self) -> None:
        """Give the adapters their initial values. Not collective."""
        if (local := self._local_adapters) is not None:
            assert self.config.lora is not None
            weights_of.load(local, partial(initial, local.weights, self.config.lora.seed))

    def enable_adapters(self, enabled: bool) -> None:
        """See `Engine.enable_adapters`."""
        if self._local_adapters is None:
            raise no_adapters(self)
        enable_adapters(self._local_model.chunks, enabled)
