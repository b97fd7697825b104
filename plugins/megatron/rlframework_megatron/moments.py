"""AdamW's moments of whole weights by the names of Hugging Face, and this rank's pieces of weights and moments.

What the optimizer holds is in `mains`: moments of whole local parameters, or of ranges of their elements. Steps are
counted by weight; Megatron steps all weights together, but what is loaded may have counted otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.policy.checkpoint.portable import FIRST, SECOND, moments_part
from rlframework.policy.model_state import Moments, Piece, ShardedState
from rlframework_megatron.flat_ranges import cells
from rlframework_megatron.main_params import Main, Mains
from rlframework_megatron.names import Part
from rlframework_megatron.weights import Holding


def gather_moments(holding: Holding) -> Iterator[tuple[str, Moments]]:
    """See `Engine.gather_moments`."""
    mains = holding.mains()
    steps = _steps(holding, mains)
    first, second = holding.gatherer(mains, "exp_avg"), holding.gatherer(mains, "exp_avg_sq")
    for name in holding.weights:
        yield name, Moments(steps[name], first(name), second(name))


def _steps(holding: Holding, mains: Mains) -> dict[str, int]:
    """Those of all weights, on every rank, from the ranks that have them. Collective."""
    numbers = {name: number for number, name in enumerate(holding.weights)}
    counts = torch.zeros(len(numbers), dtype=torch.int64, device=holding.groups.device)
    for parameter, parts in holding.parameters():
        if (main := mains.of(parameter)) is not None:
            for part in parts:
                counts[numbers[part.name]] = main.steps()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(counts, dist.ReduceOp.MAX)
    return dict(zip(numbers, counts.tolist(), strict=True))


@torch.no_grad()
def load_moments(holding: Holding, moments: Mapping[str, Moments]) -> None:
    """See `Engine.load_moments`."""
    mains = holding.mains()
    for parameter, parts in holding.parameters():
        if (main := mains.of(parameter)) is None:
            continue
        first, second = (torch.zeros_like(main.values.detach()) for _ in range(2))
        steps = []
        for part in parts:
            for cell in cells(tuple(parameter.shape), part.regions, main.start, main.stop):
                saved = moments_part(moments, part.name, cell.whole)
                cell.of(first.view(-1)).copy_(saved.exp_avg)
                cell.of(second.view(-1)).copy_(saved.exp_avg_sq)
                steps.append(saved.steps)
        # padding, which is in no weight, counts steps like the rest
        main.set_moments(max(steps) if steps else _steps_of(moments, parts[0]), first, second)


def _steps_of(moments: Mapping[str, Moments], part: Part) -> int:
    """Those of a weight of which nothing is wanted but them; one element is read."""
    return moments_part(moments, part.name, tuple(slice(0, 1) for _ in part.shape)).steps


def sharded_state(holding: Holding) -> ShardedState:
    """See `Engine.sharded_state`. A copy of a tied head is not told; a worker without fp32 values tells new ones."""
    mains = holding.mains()
    weights: list[Piece] = []
    moments: list[Piece] = []
    steps: dict[str, int] = {}
    for parameter, parts in holding.parameters():
        main = mains.of(parameter)
        parts = [part for part in parts if not part.is_copy]
        for part in parts:
            weights += _weight_pieces(parameter, part, main, mains.trains(parameter))
            if main is not None:
                steps[part.name] = main.steps()
                for start, kind in ((FIRST, "exp_avg"), (SECOND, "exp_avg_sq")):
                    value = main.moment(kind)
                    value = torch.zeros(main.stop - main.start) if value is None else value
                    moments += _pieces(start, tuple(parameter.shape), part, value, main.start)
    return ShardedState(weights, moments, steps)


def _weight_pieces(parameter: Tensor, part: Part, main: Main | None, trained: bool) -> Iterator[Piece]:
    shape = tuple(parameter.shape)
    if parameter.dtype == torch.float32 or not trained:
        yield from _pieces("", shape, part, parameter.detach().float().view(-1), 0)
    elif main is not None:
        yield from _pieces("", shape, part, main.flat, main.start)


def _pieces(prefix: str, shape: tuple[int, ...], part: Part, flat: Tensor, start: int) -> Iterator[Piece]:
    """Of the weight in `part` of a parameter of `shape`: what is in `flat`, the elements from `start` on."""
    for cell in cells(shape, part.regions, start, start + flat.numel()):
        offset = tuple(one.start for one in cell.whole)
        yield Piece(prefix + part.name, cell.of(flat), offset, part.shape)
