"""Load a model's weights into this rank's parameters and gather them, under Hugging Face names.

Weights are exchanged in fp32. Under bfloat16 they are the optimizer's fp32 main parameters (`main_params`), which the
parameters round; loading sets both. A worker without an optimizer has no fp32 copies: it rounds loaded weights to
bfloat16 and returns these as fp32.

Weights are gathered one at a time (`gathering`); loading reads only this rank's shards. Does not cover
buffers, as these models save none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.engine import GATHER, Slices, WeightSpec, slice_of, trace_span
from rlframework_megatron.coordinates import Coordinates
from rlframework_megatron.gathering import Groups, gather
from rlframework_megatron.main_params import MainParams
from rlframework_megatron.names import Weight, WeightShard, model_weights, owner_of, shards_of
from rlframework_megatron.weight_layout import extent, inside

Read = Callable[[str, Slices], Tensor]
"""`read(name, slices)`: a slice of a named weight."""


@dataclass(frozen=True)
class LocalModel:
    """This rank's shard of a model: its chunks, their optimizer, and its coordinates.

    `config`: the transformers configuration. `chunks`: unwrapped GPTModels. `optimizer`: from `get_megatron_optimizer`,
    or None. `only`: the weights that are loaded and gathered; None: the model's, without adapters.
    """

    config: Any
    coordinates: Coordinates
    chunks: Sequence[nn.Module]
    groups: Groups
    optimizer: Any | None = None
    only: Sequence[Weight] | None = None

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """The weights of the whole model, by name."""
        return {weight.name: weight for weight in (model_weights(self.config) if self.only is None else self.only)}

    @cached_property
    def shards(self) -> list[WeightShard]:
        """This rank's shards of the weights, including copies of a tied head."""
        held = (shards_of(weight, self.config, self.coordinates) for weight in self.weights.values())
        return [shard for shards in held for shard in shards]

    @cached_property
    def _owned_shards(self) -> dict[str, WeightShard]:
        return {shard.name: shard for shard in self.shards if not shard.is_copy}

    def parameters(self) -> Iterator[tuple[nn.Parameter, list[WeightShard]]]:
        """Yield each local parameter with the shards it contains."""
        found: dict[tuple[int, str], list[WeightShard]] = {}
        for shard in self.shards:
            found.setdefault((shard.chunk, shard.parameter), []).append(shard)
        for (chunk, name), shards in found.items():
            yield self.chunks[chunk].get_parameter(name), shards

    def main_params(self) -> MainParams:
        """The optimizer's current main parameters."""
        return MainParams(self.optimizer, self.groups.device)

    def gatherer(self, main_params: MainParams, kind: str = "values") -> Callable[[str], Tensor]:
        """Return a collective function that gathers a weight, or a moment of it, by name; see `MainParams.whole`.

        A fused parameter is gathered once for consecutive requests of its weights.
        """
        cached: list[tuple[nn.Parameter, Tensor]] = []

        def local(shard: WeightShard) -> Tensor:
            parameter = self.chunks[shard.chunk].get_parameter(shard.parameter)
            if not cached or cached[0][0] is not parameter:
                cached.clear()  # free the memory before gathering the next one
                cached.append((parameter, main_params.whole(parameter, kind)))
            return cached[0][1]

        def whole(name: str) -> Tensor:
            weight = self.weights[name]
            owned = owner_of(weight, self.config, self.coordinates).is_at(self.coordinates)
            own = local(self._owned_shards[name]) if owned else None
            return gather(own, weight, self.config, self.coordinates, self.groups)

        return whole


def weight_specs(config: Any) -> dict[str, WeightSpec]:
    """See `Engine.weight_specs`."""
    return {weight.name: WeightSpec(weight.shape, torch.float32) for weight in model_weights(config)}


def gather_weights(local_model: LocalModel, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """See `Engine.gather_weights`."""
    whole = local_model.gatherer(local_model.main_params())
    for name in names:
        with trace_span(GATHER):
            found = whole(name)
        yield name, found
        del found


@torch.no_grad()
def load(local_model: LocalModel, read: Read) -> None:
    """Fill this rank's parameters and their fp32 copies in place from `read`. Not collective."""
    main_params = local_model.main_params()
    for parameter, shards in local_model.parameters():
        if parameter.dtype == torch.float32:
            fill(parameter, shards, read)
            continue
        value = torch.empty_like(parameter, dtype=torch.float32)
        fill(value, shards, read)
        parameter.copy_(value)
        if (main := main_params.of(parameter)) is not None:
            main.flat.copy_(value.view(-1)[main.start : main.stop])


def fill(target: Tensor, shards: Sequence[WeightShard], read: Read) -> None:
    """Write `shards` into `target`, which has the shape of their parameter; the rest is zero padding."""
    regions = [local_slices for shard in shards for _, local_slices in shard.regions]
    if sum(map(extent, regions)) < target.numel():
        target.zero_()
    for shard in shards:
        hull = _hull(shard)
        found = None if hull is None else read(shard.name, hull)
        for whole, local_slices in shard.regions:
            value = read(shard.name, whole) if found is None or hull is None else found[inside(whole, hull)]
            target[local_slices].copy_(value)


def _hull(shard: WeightShard) -> Slices | None:
    """The slices of the whole weight that contain the regions of `shard` and nothing else, to read at once, if any."""
    along = zip(*(whole for whole, _ in shard.regions), strict=True)
    hull = tuple(slice(min(one.start for one in each), max(one.stop for one in each)) for each in along)
    return hull if extent(hull) == sum(extent(whole) for whole, _ in shard.regions) else None


def load_weights(local_model: LocalModel, weights: Mapping[str, Tensor]) -> None:
    """See `Engine.load_weights`."""
    load(local_model, partial(slice_of, weights))


def snapshot(local_model: LocalModel) -> dict[str, Tensor]:
    """See `Engine.snapshot`: whole local fp32 values, otherwise the parameters and the local fp32 shards."""
    main_params = local_model.main_params()
    found = {}
    for number, chunk in enumerate(local_model.chunks):
        for name, parameter in chunk.named_parameters():
            for kind, tensor in _snapshot_tensors(parameter, main_params).items():
                found[f"{number}.{name}{kind}"] = tensor.to("cpu", copy=True)
    return found


@torch.no_grad()
def restore(local_model: LocalModel, saved: Mapping[str, Tensor]) -> None:
    """See `Engine.restore`."""
    main_params = local_model.main_params()
    for number, chunk in enumerate(local_model.chunks):
        for name, parameter in chunk.named_parameters():
            tensors = _snapshot_tensors(parameter, main_params)
            for kind, tensor in tensors.items():
                tensor.copy_(saved[f"{number}.{name}{kind}"])
            if "" not in tensors:
                parameter.copy_(tensors[_MAIN].view(parameter.shape))


def has_partial_shards(local_model: LocalModel) -> bool:
    """Whether snapshots have rounded parameters and fp32 shards of them; the same on all ranks."""
    rounded = any(parameter.dtype != torch.float32 for parameter, _ in local_model.parameters())
    return rounded and local_model.main_params().sharded


@torch.no_grad()
def round_parameters(local_model: LocalModel) -> None:
    """Set the parameters of all ranks from their fp32 copies in the optimizer, as a step does. Collective."""
    main_params = local_model.main_params()
    for parameter, _ in local_model.parameters():
        if parameter.dtype != torch.float32:
            parameter.copy_(main_params.whole(parameter))


_MAIN = ".fp32"


def _snapshot_tensors(parameter: Tensor, main_params: MainParams) -> dict[str, Tensor]:
    """A parameter's tensors in a snapshot, by key suffix: "" is the parameter, omitted if all fp32 values are local."""
    main = main_params.of(parameter)
    if main is None or parameter.dtype == torch.float32:
        return {"": parameter.detach()}
    if main.stop - main.start == parameter.numel():
        return {_MAIN: main.flat}
    return {"": parameter.detach(), _MAIN: main.flat}
