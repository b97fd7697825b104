"""How a model sharded over a mesh keeps weights, adapters and optimizer moments: the hooks of core's `ModelState`."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rlframework.engine import (
    FIRST,
    SECOND,
    FileWeight,
    HostBuffers,
    ModelState,
    Moments,
    TensorShard,
    external_name,
    named_tensors,
)
from rlframework_dtensor.shards import copy_into_shard, gather_full, local_tensor, reshard, tensor_shards


class MeshState(ModelState, ABC):
    """The primitives of `Engine` that read and write weights and moments."""

    _optimizer: torch.optim.Optimizer | None

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

    def _weight_shards(self, tensor: Tensor, parts: Sequence[FileWeight]) -> Iterator[TensorShard]:
        for part in parts:
            yield from tensor_shards(part, tensor)

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

    # -- moments ------------------------------------------------------------------------------------------------------

    def _trained(self) -> dict[str, nn.Parameter]:
        if self._optimizer is None:
            return {}
        named = self.model.named_parameters()
        return {external_name(name): parameter for name, parameter in named if parameter.requires_grad}

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of `parameter`; empty before the first step."""
        return {} if self._optimizer is None else self._optimizer.state.get(parameter, {})

    def _moment_kinds(self, parameter: Tensor) -> dict[str, str]:
        """The moments of `parameter` as the optimizer names them, by their prefix in files: Muon's has one."""
        state = self._state(parameter)
        only_first = bool(state) and "exp_avg_sq" not in state
        return {FIRST: "exp_avg"} if only_first else {FIRST: "exp_avg", SECOND: "exp_avg_sq"}

    def _moment_shards(self, parameter: nn.Parameter, parts: Sequence[FileWeight]) -> Iterator[TensorShard]:
        state = self._state(parameter)
        for prefix, kind in self._moment_kinds(parameter).items():
            value = state[kind] if state else torch.zeros_like(parameter)
            for part in parts:
                yield from tensor_shards(part, value, prefix)

    def _steps(self, parameter: nn.Parameter) -> int:
        return int(self._state(parameter).get("step", 0))

    def _create_moments(self, steps: Mapping[nn.Parameter, int]) -> None:
        assert self._optimizer is not None
        for parameter, count in steps.items():
            moments = {kind: torch.empty_like(parameter) for kind in self._moment_kinds(parameter).values()}
            step = torch.tensor(float(count), device=local_tensor(parameter).device)
            self._optimizer.state[parameter] = {"step": step, **moments}

    def _whole_moments(self, parameter: nn.Parameter) -> Moments:
        if not (state := self._state(parameter)):
            return Moments(0, torch.zeros(parameter.shape), torch.zeros(parameter.shape))
        second = gather_full(state["exp_avg_sq"]) if "exp_avg_sq" in state else torch.empty(0)
        return Moments(int(state["step"]), gather_full(state["exp_avg"]), second)
