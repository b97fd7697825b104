"""`ModelState`: the weights and moments of a transformers model by the names of its files, whole or as shards.

Refits, saving, portable and sharded checkpoints use it. A backend says how it shards a tensor; `FileLayout` says which
weights of files a tensor has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from rlframework.models.adapters import ModelAdapters
from rlframework.models.file_weights import FileLayout, FileWeight, gathered
from rlframework.policy.engine import Moments, ShardedState, TensorShard, WeightSpec
from rlframework.policy.lora_math import is_adapter
from rlframework.policy.profiling import GATHER, trace_span
from rlframework.policy.tensor_shards import fill_moments, fill_weights, steps_of


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
