"""AdamW moments of whole weights under Hugging Face names, and this rank's shards of weights and moments.

`main_params` reads the optimizer: moments of whole local parameters or of ranges of their elements. Steps are counted
per weight; Megatron steps all weights together, but a loaded checkpoint may have different counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.engine import FIRST, SECOND, Moments, ShardedState, TensorShard, fill_moments, flat_shards, steps_of
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
        main.set_moments(steps_of(moments, [shard.name for shard in shards]), first, second)
        for shard in shards:
            fill_moments(_moment_shards(parameter, shard, main), moments)


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
            if parameter.dtype == torch.float32 or not main_params.trains(parameter):
                weights += _shards_of(parameter, shard, parameter.detach().float().view(-1))
            elif main is not None:
                weights += _shards_of(parameter, shard, main.flat, main.start)
            if main is not None:
                steps[shard.name] = main.steps()
                moments += _moment_shards(parameter, shard, main)
    return ShardedState(weights, moments, steps)


def _moment_shards(parameter: Tensor, shard: WeightShard, main: MainParam) -> Iterator[TensorShard]:
    for prefix, kind in ((FIRST, "exp_avg"), (SECOND, "exp_avg_sq")):
        value = main.moment(kind)
        value = torch.zeros(main.stop - main.start) if value is None else value
        yield from _shards_of(parameter, shard, value, main.start, prefix)


def _shards_of(
    parameter: Tensor, shard: WeightShard, flat: Tensor, start: int = 0, prefix: str = ""
) -> Iterator[TensorShard]:
    """Shards of a weight in `parameter` that lie in `flat`, the parameter's elements from `start` on."""
    return flat_shards(prefix + shard.name, shard.shape, flat, start, tuple(parameter.shape), shard.regions)
