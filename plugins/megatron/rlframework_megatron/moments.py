"""AdamW moments of whole weights under Hugging Face names, and this rank's shards of weights and moments.

`main_params` reads the optimizer: moments of whole local parameters or of ranges of their elements. Steps are counted
per weight; Megatron steps all weights together, but a loaded checkpoint may have different counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.engine import FIRST, SECOND, Moments, ShardedState, TensorShard, moments_slice
from rlframework_megatron.flat_ranges import flat_blocks
from rlframework_megatron.main_params import MainParam, MainParams
from rlframework_megatron.names import WeightShard
from rlframework_megatron.weights import LocalModel


def gather_moments(local_model: LocalModel) -> Iterator[tuple[str, Moments]]:
    """See `Engine.gather_moments`."""
    main_params = local_model.main_params()
    steps = _steps(local_model, main_params)
    first, second = local_model.gatherer(main_params, "exp_avg"), local_model.gatherer(main_params, "exp_avg_sq")
    for name in local_model.weights:
        yield name, Moments(steps[name], first(name), second(name))


def _steps(local_model: LocalModel, main_params: MainParams) -> dict[str, int]:
    """Optimizer steps of all weights, on every rank. Collective."""
    numbers = {name: number for number, name in enumerate(local_model.weights)}
    counts = torch.zeros(len(numbers), dtype=torch.int64, device=local_model.groups.device)
    for parameter, shards in local_model.parameters():
        if (main := main_params.of(parameter)) is not None:
            for shard in shards:
                counts[numbers[shard.name]] = main.steps()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(counts, dist.ReduceOp.MAX)
    return dict(zip(numbers, counts.tolist(), strict=True))


@torch.no_grad()
def load_moments(local_model: LocalModel, moments: Mapping[str, Moments]) -> None:
    """See `Engine.load_moments`."""
    main_params = local_model.main_params()
    for parameter, shards in local_model.parameters():
        if (main := main_params.of(parameter)) is None:
            continue
        first, second = (torch.zeros_like(main.values.detach()) for _ in range(2))
        steps = []
        for shard in shards:
            for block in flat_blocks(tuple(parameter.shape), shard.regions, main.start, main.stop):
                saved = moments_slice(moments, shard.name, block.whole)
                block.of(first.view(-1)).copy_(saved.exp_avg)
                block.of(second.view(-1)).copy_(saved.exp_avg_sq)
                steps.append(saved.steps)
        # a shard that is all padding has no weight to take the step count from
        main.set_moments(max(steps) if steps else _steps_of(moments, shards[0]), first, second)


def _steps_of(moments: Mapping[str, Moments], shard: WeightShard) -> int:
    """The step count of a weight whose moments are not needed; reads one element."""
    return moments_slice(moments, shard.name, tuple(slice(0, 1) for _ in shard.shape)).steps


def sharded_state(local_model: LocalModel) -> ShardedState:
    """See `Engine.sharded_state`. Skips the copy of a tied head; a worker without fp32 values converts its weights."""
    main_params = local_model.main_params()
    weights: list[TensorShard] = []
    moments: list[TensorShard] = []
    steps: dict[str, int] = {}
    for parameter, shards in local_model.parameters():
        main = main_params.of(parameter)
        shards = [shard for shard in shards if not shard.is_copy]
        for shard in shards:
            weights += _weight_shards(parameter, shard, main, main_params.trains(parameter))
            if main is not None:
                steps[shard.name] = main.steps()
                for start, kind in ((FIRST, "exp_avg"), (SECOND, "exp_avg_sq")):
                    value = main.moment(kind)
                    value = torch.zeros(main.stop - main.start) if value is None else value
                    moments += _tensor_shards(start, tuple(parameter.shape), shard, value, main.start)
    return ShardedState(weights, moments, steps)


def _weight_shards(
    parameter: Tensor, shard: WeightShard, main: MainParam | None, trained: bool
) -> Iterator[TensorShard]:
    shape = tuple(parameter.shape)
    if parameter.dtype == torch.float32 or not trained:
        yield from _tensor_shards("", shape, shard, parameter.detach().float().view(-1), 0)
    elif main is not None:
        yield from _tensor_shards("", shape, shard, main.flat, main.start)


def _tensor_shards(
    prefix: str, shape: tuple[int, ...], shard: WeightShard, flat: Tensor, start: int
) -> Iterator[TensorShard]:
    """Shards of a weight in a parameter of `shape` that lie in `flat`, the parameter's elements from `start` on."""
    for block in flat_blocks(shape, shard.regions, start, start + flat.numel()):
        offset = tuple(one.start for one in block.whole)
        yield TensorShard(prefix + shard.name, block.of(flat), offset, shard.shape)
