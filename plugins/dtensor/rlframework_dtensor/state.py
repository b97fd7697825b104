"""The worker's state by name: weights, adapters and optimizer moments, whole or as this rank's shards.

Weight sync, saving, both forms of checkpoints and the reference swap use it. Names are those of `save_pretrained`;
`rlframework.models.file_weights` has them, `rlframework.models.adapters` those of adapters.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from rlframework.base.errors import NotSupported
from rlframework.engine import (
    FIRST,
    GATHER,
    SECOND,
    FileLayout,
    HostBuffers,
    Moments,
    ShardedState,
    TensorShard,
    WeightSpec,
    adapters,
    external_name,
    gathered,
    is_adapter,
    named_tensors,
    trace_span,
)
from rlframework_dtensor.shards import (
    copy_into_shard,
    fill_moments,
    gather_full,
    load_weights,
    local_tensor,
    reshard,
    tensor_shards,
)


class ModelState(adapters.ModelAdapters, ABC):
    """The primitives of `Engine` that read and write weights and moments."""

    _optimizer: torch.optim.Optimizer | None
    _layout: FileLayout

    # -- weights ------------------------------------------------------------------------------------------------------

    def _named_tensors(self) -> dict[str, Tensor]:
        """The model's saved tensors and its adapters, by name; a tied head appears once, as the embedding.

        `_layout` has their names in files. Gathered parameters are freed first, see `reshard`.
        """
        reshard(self.model)
        return named_tensors(self.model)

    def _gather_tensor(self, tensor: Tensor) -> Tensor:
        return gather_full(tensor)

    def _write_tensor(self, tensor: Tensor, value: Tensor) -> None:
        copy_into_shard(tensor, value)

    def _weights(self) -> dict[str, Tensor]:
        """The saved tensors, without adapters."""
        return {name: weight for name, weight in self._named_tensors().items() if not is_adapter(name)}

    def weight_specs(self) -> dict[str, WeightSpec]:
        """See `Engine.weight_specs`."""
        weights = self._weights()
        parts = self._layout.weights.items()
        return {name: WeightSpec(part.shape, weights[part.source].dtype) for name, part in parts}

    def gather_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.gather_weights`."""
        weights = self._named_tensors()

        def gather(name: str) -> Tensor:
            with trace_span(GATHER):
                return self._merged(name, weights)

        yield from gathered(names, self._layout.weights, gather)

    def _local_weights(self) -> dict[str, Tensor]:
        return {name: local_tensor(weight).detach() for name, weight in self._named_tensors().items()}

    def snapshot(self) -> dict[str, Tensor]:
        """See `Engine.snapshot`."""
        return HostBuffers().fetch(self._local_weights())

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """See `Engine.restore`; does not wait for the device."""
        for name, weight in self._local_weights().items():
            weight.copy_(snapshot[name], non_blocking=True)

    def swap(self, snapshot: dict[str, Tensor], host: HostBuffers) -> dict[str, Tensor]:
        """See `Engine.swap`."""
        return host.exchange(self._local_weights(), snapshot)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `Engine.load_weights`."""
        load_weights(self._weights(), self._layout.weights, weights)

    def _trained(self) -> dict[str, Tensor]:
        """The parameters that the optimizer updates, by the names of `weight_specs`."""
        assert self._optimizer is not None
        named = self.model.named_parameters()
        return {external_name(name): parameter for name, parameter in named if parameter.requires_grad}

    def _moment_kinds(self, parameter: Tensor) -> dict[str, str]:
        """The moments of `parameter` as the optimizer names them, by their prefix in files: Muon's has one."""
        assert self._optimizer is not None
        only_first = "exp_avg_sq" not in self._optimizer.state.get(parameter, {"exp_avg_sq": None})
        return {FIRST: "exp_avg"} if only_first else {FIRST: "exp_avg", SECOND: "exp_avg_sq"}

    def gather_moments(self) -> Iterator[tuple[str, Moments]]:
        """See `Engine.gather_moments`."""
        assert self._optimizer is not None
        trained = self._trained()
        parts = self._layout.by_source
        for name, parameter in trained.items():
            state = self._optimizer.state.get(parameter)
            steps, first, second = 0, torch.zeros(parameter.shape), torch.zeros(parameter.shape)
            if state:
                steps, first = int(state["step"]), gather_full(state["exp_avg"])
                second = gather_full(state["exp_avg_sq"]) if "exp_avg_sq" in state else torch.empty(0)
            for part in parts[name]:
                yield part.name, Moments(steps, part.of(first), part.of(second) if second.numel() else second)

    def load_moments(self, moments: Mapping[str, Moments]) -> None:
        """See `Engine.load_moments`."""
        assert self._optimizer is not None
        trained = self._trained()
        parts = self._layout.by_source
        for name, parameter in trained.items():
            filled = {kind: torch.empty_like(parameter) for kind in self._moment_kinds(parameter).values()}
            steps = fill_moments(parts[name], moments, list(filled.values()))
            step = torch.tensor(float(steps), device=local_tensor(parameter).device)
            self._optimizer.state[parameter] = {"step": step, **filled}

    def sharded_state(self) -> ShardedState:
        """See `Engine.sharded_state`."""
        if self.config.lora is not None:
            raise NotSupported("adapters are saved in the portable form only; set checkpoints.format=portable")
        tensors = self._weights()
        parts = self._layout.by_source
        weights = [
            shard for part in self._layout.weights.values() for shard in tensor_shards(part, tensors[part.source])
        ]
        trained = self._trained() if self._optimizer is not None else {}
        moments: list[TensorShard] = []
        steps: dict[str, int] = {}
        for name, parameter in trained.items():
            state = self._optimizer.state.get(parameter) if self._optimizer is not None else None
            state = state or {}
            steps |= {part.name: int(state.get("step", 0)) for part in parts[name]}
            for start, kind in self._moment_kinds(parameter).items():
                value = state[kind] if state else torch.zeros_like(parameter)
                moments += [shard for part in parts[name] for shard in tensor_shards(part, value, start)]
        return ShardedState(weights, moments, steps)
