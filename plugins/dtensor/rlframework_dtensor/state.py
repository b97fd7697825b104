"""What a worker holds, by name: weights, adapters and the optimizer's moments, whole or in this rank's pieces.

Refit, saving, checkpoints in both forms and the reference swap go through it. Names are those of `save_pretrained`;
`file_names` has those of mixtures of experts, `lora` those of adapters.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rlframework.errors import NotSupported
from rlframework.models import adapters
from rlframework.models.file_names import by_source, file_weights, gathered
from rlframework.models.named_tensors import held_tensors
from rlframework.policy.checkpoint.portable import FIRST, SECOND
from rlframework.policy.checkpoint.saved import part_of
from rlframework.policy.engine import Engine
from rlframework.policy.lora_math import is_adapter
from rlframework.policy.model_state import Moments, Piece, ShardedState, WeightSpec
from rlframework.policy.trace_spans import GATHER, span
from rlframework_dtensor.file_names import fill_moments, here, pieces
from rlframework_dtensor.shards import local, put, whole


class Held(adapters.ModelAdapters, Engine, ABC):
    """The primitives of `Engine` for weights and moments."""

    _optimizer: torch.optim.Optimizer | None

    # -- weights ------------------------------------------------------------------------------------------------------

    def _held(self) -> dict[str, Tensor]:
        """The model's tensors that are saved, by name, and adapters; a tied head stands once, as the embedding.

        Outside, the experts of a mixture have the names of files instead: see `file_names`.

        Gathered parameters are let go first: what FSDP leaves whole after a forward without gradients is a copy, and
        writing to the shards behind it would leave it stale without an error.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return held_tensors(self.model)

    def _whole(self, tensor: Tensor) -> Tensor:
        return whole(tensor)

    def _put(self, tensor: Tensor, value: Tensor) -> None:
        put(tensor, value)

    def _weights(self) -> dict[str, Tensor]:
        """Those that are saved, as they are without adapters."""
        return {name: weight for name, weight in self._held().items() if not is_adapter(name)}

    def weight_specs(self) -> dict[str, WeightSpec]:
        """See `Engine.weight_specs`."""
        weights = self._weights()
        parts = file_weights(self.model, weights)
        return {name: WeightSpec(part.shape, weights[part.source].dtype) for name, part in parts.items()}

    def gather_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.gather_weights`."""
        weights = self._held()

        def gather(name: str) -> Tensor:
            with span(GATHER):
                return self._merged(name, weights)

        yield from gathered(names, file_weights(self.model, weights), gather)

    def snapshot(self) -> dict[str, Tensor]:
        """See `Engine.snapshot`."""
        return {name: local(weight).to("cpu", copy=True) for name, weight in self._held().items()}

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """See `Engine.restore`."""
        for name, weight in self._held().items():
            local(weight).copy_(snapshot[name])

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `Engine.load_weights`."""
        own = self._weights()
        for name, part in file_weights(self.model, own).items():
            if (found := here(part, own[part.source])) is not None:
                found[0].copy_(part_of(weights, name, found[1]))

    def _trained(self) -> dict[str, Tensor]:
        """The parameters that the optimizer has, by the names of `weight_specs`."""
        assert self._optimizer is not None
        named = self.model.named_parameters()
        return {adapters.outside(name): parameter for name, parameter in named if parameter.requires_grad}

    def gather_moments(self) -> Iterator[tuple[str, Moments]]:
        """See `Engine.gather_moments`."""
        assert self._optimizer is not None
        trained = self._trained()
        parts = by_source(file_weights(self.model, trained))
        for name, parameter in trained.items():
            state = self._optimizer.state.get(parameter)
            steps, first, second = 0, torch.zeros(parameter.shape), torch.zeros(parameter.shape)
            if state:
                steps, first, second = int(state["step"]), whole(state["exp_avg"]), whole(state["exp_avg_sq"])
            for part in parts[name]:
                yield part.name, Moments(steps, part.of(first), part.of(second))

    def load_moments(self, moments: Mapping[str, Moments]) -> None:
        """See `Engine.load_moments`."""
        assert self._optimizer is not None
        trained = self._trained()
        parts = by_source(file_weights(self.model, trained))
        for name, parameter in trained.items():
            first, second = torch.empty_like(parameter), torch.empty_like(parameter)
            steps = fill_moments(parts[name], moments, first, second)
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(steps), device=local(parameter).device),
                "exp_avg": first,
                "exp_avg_sq": second,
            }

    def sharded_state(self) -> ShardedState:
        """See `Engine.sharded_state`."""
        if self.config.lora is not None:
            raise NotSupported("adapters are saved in the portable form only; set checkpoints.format to portable")
        own = self._weights()
        weights = [piece for part in file_weights(self.model, own).values() for piece in pieces(part, own[part.source])]
        trained = self._trained() if self._optimizer is not None else {}
        parts = by_source(file_weights(self.model, trained))
        moments: list[Piece] = []
        steps: dict[str, int] = {}
        for name, parameter in trained.items():
            state = self._optimizer.state.get(parameter) if self._optimizer is not None else None
            state = state or {}
            steps |= {part.name: int(state.get("step", 0)) for part in parts[name]}
            for start, kind in ((FIRST, "exp_avg"), (SECOND, "exp_avg_sq")):
                value = state[kind] if state else torch.zeros_like(parameter)
                moments += [piece for part in parts[name] for piece in pieces(part, value, start)]
        return ShardedState(weights, moments, steps)
