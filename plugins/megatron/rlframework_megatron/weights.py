"""A model's weights under the names of Hugging Face, into and out of this rank's parameters.

Weights are fp32 outside. Under bfloat16 the values are those that the optimizer updates, its fp32 copies (`mains`), and
the parameters are these, rounded; a load sets both from the fp32 that it reads. A worker without an optimizer has no
fp32 copies: what it loads is rounded to bfloat16, and what it tells is that, in fp32.

Gathering is one weight at a time (`gathering`); loading reads this rank's parts alone (`reading`). Left out: buffers,
of which these models save none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.policy.checkpoint.saved import part_of
from rlframework.policy.model_state import WeightSpec
from rlframework.policy.trace_spans import GATHER, span
from rlframework_megatron.coordinates import Place
from rlframework_megatron.gathering import Groups, gather, has_it
from rlframework_megatron.main_params import Mains
from rlframework_megatron.names import Part, Weight, home, local_parts, model_weights
from rlframework_megatron.weight_layout import Where, extent, inside

Read = Callable[[str, Where], Tensor]
"""A box of the weight of a name."""


@dataclass(frozen=True)
class Holding:
    """This rank's part of a model: its chunks, the optimizer that trains them, and where it stands among the others.

    `config`: of transformers. `chunks`: GPTModels without wrappers. `optimizer`: of `get_megatron_optimizer`, or None.
    """

    config: Any
    place: Place
    chunks: Sequence[nn.Module]
    groups: Groups
    optimizer: Any | None = None

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """All weights of the whole model, by name."""
        return {weight.name: weight for weight in model_weights(self.config)}

    @cached_property
    def parts(self) -> list[Part]:
        """What this rank has of them, copies of a tied head too."""
        return local_parts(self.config, self.place)

    @cached_property
    def _told(self) -> dict[str, Part]:
        return {part.name: part for part in self.parts if not part.is_copy}

    def parameters(self) -> Iterator[tuple[nn.Parameter, list[Part]]]:
        """Each local parameter, and the weights in it."""
        found: dict[tuple[int, str], list[Part]] = {}
        for part in self.parts:
            found.setdefault((part.chunk, part.parameter), []).append(part)
        for (chunk, name), parts in found.items():
            yield self.chunks[chunk].get_parameter(name), parts

    def mains(self) -> Mains:
        """What the optimizer holds now."""
        return Mains(self.optimizer, self.groups.device)

    def gatherer(self, mains: Mains, kind: str = "values") -> Callable[[str], Tensor]:
        """A function that gives the whole weight of a name, or a moment of it: see `Mains.whole`. Collective.

        A parameter is put together once for all weights in it that are asked for one after the other.
        """
        held: list[tuple[nn.Parameter, Tensor]] = []

        def local(part: Part) -> Tensor:
            parameter = self.chunks[part.chunk].get_parameter(part.parameter)
            if not held or held[0][0] is not parameter:
                held.clear()  # before the next one comes
                held.append((parameter, mains.whole(parameter, kind)))
            return held[0][1]

        def whole(name: str) -> Tensor:
            weight = self.weights[name]
            told = has_it(home(weight, self.config, self.place), self.place)
            own = local(self._told[name]) if told else None
            return gather(own, weight, self.config, self.place, self.groups)

        return whole


def weight_specs(config: Any) -> dict[str, WeightSpec]:
    """See `Engine.weight_specs`."""
    return {weight.name: WeightSpec(weight.shape, torch.float32) for weight in model_weights(config)}


def gather_weights(holding: Holding, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """See `Engine.gather_weights`."""
    whole = holding.gatherer(holding.mains())
    for name in names:
        with span(GATHER):
            found = whole(name)
        yield name, found
        del found


@torch.no_grad()
def load(holding: Holding, read: Read) -> None:
    """Fill this rank's parameters, in place, and the fp32 copies of them, with what `read` gives. No collective."""
    mains = holding.mains()
    for parameter, parts in holding.parameters():
        if parameter.dtype == torch.float32:
            fill(parameter, parts, read)
            continue
        value = torch.empty_like(parameter, dtype=torch.float32)
        fill(value, parts, read)
        parameter.copy_(value)
        if (main := mains.of(parameter)) is not None:
            main.flat.copy_(value.view(-1)[main.start : main.stop])


def fill(target: Tensor, parts: Iterable[Part], read: Read) -> None:
    """Put the weights of `parts` into `target`, of the shape of their parameter; the rest of it, padding, is 0."""
    regions = [(part.name, *region) for part in parts for region in part.regions]
    if sum(extent(here) for _, _, here in regions) < target.numel():
        target.zero_()
    for part in parts:
        for box, places in _boxes_to_read(part):
            found = read(part.name, box)
            for there, here in places:
                target[here].copy_(found[there])


def _boxes_to_read(part: Part) -> Iterator[tuple[Where, list[tuple[Where, Where]]]]:
    """Boxes of the whole weight, one where the regions make up one; where each region lies in the box, and here."""
    if not part.regions:
        return
    spans = [(min(one.start for one in along), max(one.stop for one in along)) for along in _by_dimension(part)]
    hull = tuple(slice(start, stop) for start, stop in spans)
    if extent(hull) != sum(extent(whole) for whole, _ in part.regions):
        for whole, here in part.regions:
            yield whole, [(tuple(slice(0, one.stop - one.start) for one in whole), here)]
        return
    yield hull, [(inside(whole, hull), here) for whole, here in part.regions]


def _by_dimension(part: Part) -> Iterator[tuple[slice, ...]]:
    return zip(*(whole for whole, _ in part.regions), strict=True)


def load_weights(holding: Holding, weights: Mapping[str, Tensor]) -> None:
    """See `Engine.load_weights`."""
    load(holding, partial(part_of, weights))


def snapshot(holding: Holding) -> dict[str, Tensor]:
    """See `Engine.snapshot`: fp32 values where they are here whole, else the parameters, and what is here in fp32."""
    mains = holding.mains()
    found = {}
    for number, chunk in enumerate(holding.chunks):
        for name, parameter in chunk.named_parameters():
            for kind, tensor in _held(parameter, mains).items():
                found[f"{number}.{name}{kind}"] = tensor.to("cpu", copy=True)
    return found


@torch.no_grad()
def restore(holding: Holding, saved: Mapping[str, Tensor]) -> None:
    """See `Engine.restore`."""
    mains = holding.mains()
    for number, chunk in enumerate(holding.chunks):
        for name, parameter in chunk.named_parameters():
            held = _held(parameter, mains)
            for kind, tensor in held.items():
                tensor.copy_(saved[f"{number}.{name}{kind}"])
            if "" not in held:
                parameter.copy_(held[_MAIN].view(parameter.shape))


_MAIN = ".fp32"


def _held(parameter: Tensor, mains: Mains) -> dict[str, Tensor]:
    """What a snapshot has of a parameter: "" is itself, left out where all fp32 values are here: these, rounded."""
    main = mains.of(parameter)
    if main is None or parameter.dtype == torch.float32:
        return {"": parameter.detach()}
    if main.stop - main.start == parameter.numel():
        return {_MAIN: main.flat}
    return {"": parameter.detach(), _MAIN: main.flat}
