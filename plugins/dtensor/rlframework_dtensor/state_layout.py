"""Memory that the engine keeps for each parameter, for estimates. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from rlframework.config.sections import RunConfig
from rlframework_dtensor.config import MEMORY_SHARE, DTensorConfig
from rlframework_tools.estimates.state_layout import (
    FORWARD_BACKWARD_STEP,
    Place,
    PlannedWorker,
    State,
    StateLayout,
    compute_width,
)


def state_layout(config: RunConfig, worker: PlannedWorker) -> StateLayout:
    """Return the layout of FSDP2: fp32 weights, gradients and moments in shards, and units gathered to compute.

    A unit's backward holds its weights, those of the next unit, its gradients, and their fp32 copy for the reduction.
    A single worker in fp32 has plain tensors instead. See `model_builder` and `reduction`.
    """
    policy, section = config.policy, getattr(config.policy, "dtensor", None) or DTensorConfig()
    parallelism, workers = policy.parallelism, config.worker_group.num_workers
    width = compute_width(config)
    if workers == 1 and width == 4 and not policy.offload.parameters:
        # the products of the head and of the embedding's backward, before they are added to the gradients
        states = _states(policy.optimizer.name, 1, 1, "device", "device")
        return StateLayout(states, transient=0 if policy.lora else 8, shares_model=True)
    data_shard = workers // parallelism.model_size // section.replicate
    shards = data_shard * parallelism.context
    states = _states(
        policy.optimizer.name,
        shards,
        data_shard // parallelism.expert,
        "host" if policy.offload.parameters else "device",
        "host" if policy.offload.parameters or policy.offload.optimizer else "device",
    )
    if policy.offload.optimizer and not policy.offload.parameters:
        on_gpu = [
            replace(one, name=f"{one.name}, on the GPU", place="device", phases=("updating",)) for one in states[2:]
        ]
        states = (*states, *on_gpu)
    if not section.reshard_after_forward:
        states = (*states, State("gathered weights", width, phases=("training",)))
    if _reduces_once(section, worker, parallelism.tensor) and shards > 1:
        states = (*states, State("whole gradients", 4, trained=True, phases=("training",)))
    transient = 2 * width if policy.lora else 3 * width + 4
    return StateLayout(states, transient=transient, gathers=True)


def _states(optimizer: str, shards: int, expert_shards: int, weights: Place, moments: Place) -> tuple[State, ...]:
    over = shards, expert_shards
    states = (
        State("weights", 4, *over, place=weights),
        State("gradients", 4, *over, trained=True, place=weights, phases=FORWARD_BACKWARD_STEP),
    )
    if optimizer == "muon":  # one moment of the matrices, two of everything else
        first = State("moments", 4, *over, trained=True, place=moments)
        return (*states, first, replace(first, name="second moments", matrices=False))
    return (*states, State("moments", 8, *over, trained=True, place=moments))


def _reduces_once(section: DTensorConfig, worker: PlannedWorker, tensor: int) -> bool:
    """Whether gradients stay whole until the last microbatch of a step; see `reduction.GradientReduction`."""
    if section.reduce_gradients != "auto":
        return section.reduce_gradients == "step"
    memory = worker.gpu_bytes or 0
    return worker.device == "cuda" and MEMORY_SHARE * 4 * worker.trained // tensor <= memory
