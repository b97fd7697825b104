"""What a worker holds, by the names of Hugging Face: the primitives of `Engine` for weights and moments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor

from rlframework.policy.engine import Engine
from rlframework.policy.model_state import Moments, ShardedState, WeightSpec
from rlframework_megatron import moments as moments_of
from rlframework_megatron import native
from rlframework_megatron import weights as weights_of
from rlframework_megatron.weight_files import FolderWeights
from rlframework_megatron.weights import Holding


def load_from_folder(holding: Holding, folder: str | Path) -> None:
    """Fill the parameters, and the fp32 copies that the optimizer has of them, from safetensors files in `folder`.

    To be called once the optimizer is made. Each rank reads its own parts.
    """
    with FolderWeights(folder, holding.config) as saved:
        weights_of.load(holding, saved.part)


class Held(Engine, ABC):
    """A worker sets `_holding` in `build`."""

    _holding: Holding

    @abstractmethod
    def _megatron(self) -> AbstractContextManager[None]:
        """Around every use of megatron-core."""

    @abstractmethod
    def _settle(self) -> None:
        """Bring updated weights that are still on other ranks here. Collective where there are any."""

    def _back(self) -> None:
        """Bring weights here that are in CPU memory. No collective."""
        self.move(self._holding.groups.device, model=True)

    def weight_specs(self) -> dict[str, WeightSpec]:
        """See `Engine.weight_specs`."""
        return weights_of.weight_specs(self._holding.config)

    def gather_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.gather_weights`."""
        self._back()
        self._settle()
        return weights_of.gather_weights(self._holding, names)

    def snapshot(self) -> dict[str, Tensor]:
        """See `Engine.snapshot`."""
        self._back()
        self._settle()
        return weights_of.snapshot(self._holding)

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """See `Engine.restore`."""
        self._back()
        weights_of.restore(self._holding, snapshot)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `Engine.load_weights`."""
        self._back()
        weights_of.load_weights(self._holding, weights)

    def gather_moments(self) -> Iterator[tuple[str, Moments]]:
        """See `Engine.gather_moments`."""
        return moments_of.gather_moments(self._holding)

    def load_moments(self, moments: Mapping[str, Moments]) -> None:
        """See `Engine.load_moments`."""
        moments_of.load_moments(self._holding, moments)

    def sharded_state(self) -> ShardedState:
        """See `Engine.sharded_state`."""
        self._back()
        self._settle()
        return moments_of.sharded_state(self._holding)

    def save_native(self, folder: Path, *, optimizer: bool) -> None:
        """See `Engine.save_native`."""
        self._back()
        self._settle()
        with self._megatron():
            native.save(self._holding, folder, optimizer=optimizer)

    def load_native(self, folder: Path, *, optimizer: bool) -> None:
        """See `Engine.load_native`."""
        self._back()
        self._settle()
        with self._megatron():
            native.load(self._holding, folder, optimizer=optimizer)
