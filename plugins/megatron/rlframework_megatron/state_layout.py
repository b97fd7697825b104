"""Memory that megatron-core keeps for each parameter, for estimates. Imports no torch."""

from __future__ import annotations

from rlframework.config.sections import RunConfig
from rlframework_megatron.config import MegatronConfig
from rlframework_tools.estimates.state_layout import Place, PlannedWorker, State, StateLayout, compute_width


def state_layout(config: RunConfig, worker: PlannedWorker) -> StateLayout:
    """Return the layout of megatron-core: whole weights and fp32 gradient buffers of the worker's part of the model.

    The distributed optimizer shards moments and, in bfloat16, fp32 main weights over data and context parallelism.
    """
    policy, section = config.policy, getattr(config.policy, "megatron", None) or MegatronConfig()
    parallelism, width = policy.parallelism, compute_width(config)
    data = config.worker_group.num_workers // (parallelism.tensor * parallelism.pipeline)
    shards, expert_shards = (data, data // parallelism.expert) if section.distributed_optimizer else (1, 1)
    place: Place = "host" if policy.offload.optimizer else "device"
    states = [
        State("weights", width),
        State("gradients", 4, trained=True),
        State("moments", 8, shards, expert_shards, trained=True, place=place),
    ]
    if width < 4:
        states.append(State("main weights", 4, shards, expert_shards, trained=True, place=place))
    if policy.offload.optimizer:
        widths = 8 if width == 4 else 12
        states.append(State("moments, on the GPU", widths, shards, expert_shards, trained=True, phases=("updating",)))
    # the gradient of a unit before it is added to its buffer, in fp32 for the head's; frozen units have none
    return StateLayout(tuple(states), transient=0 if policy.lora else width + 4)
