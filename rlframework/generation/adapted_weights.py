"""Adapters for an engine whose own loader takes whole weights: they are merged into the base model here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from rlframework.generation.engine_model import EngineModel
from rlframework.policy.lora_math import is_adapter
from rlframework.weight_sync.buffers import WeightInfo
from rlframework.weight_sync.receiver import CollectingSink, WeightSink


class AdaptedWeights:
    """The base model of an engine, merged with the latest adapters on the CPU as by `EngineModel.load_adapters`."""

    def __init__(
        self, model_name: str, precision: str, device: torch.device, whole: Callable[[WeightInfo], WeightSink]
    ) -> None:
        """Read nothing before the first adapters. `whole(info)`: the engine's destination of whole weights."""
        self._model = EngineModel(model_name, "cpu", precision)
        self._device, self._whole = device, whole

    def sink(self, info: WeightInfo) -> WeightSink:
        """Return the destination of an update of adapters alone, or of whole weights."""
        return CollectingSink(info, self._device, self._load) if all(map(is_adapter, info)) else self._whole(info)

    def _load(self, adapters: Iterable[tuple[str, Tensor]]) -> None:
        """Merge `adapters` into the base, and give the engine all weights."""
        self._model.load_adapters(adapters)
        weights = self._model.weights()
        sink = self._whole({name: (tuple(weight.shape), weight.dtype) for name, weight in weights.items()})
        for name, weight in weights.items():
            sink.copy(name, weight)
        sink.finish()
