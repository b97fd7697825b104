"""Memory that DeepSpeed keeps for each parameter, for estimates. Imports no torch."""

from __future__ import annotations

from typing import Any

from rlframework.config.sections import RunConfig
from rlframework_deepspeed.config import BUCKET, DeepSpeedConfig, zero_keys
from rlframework_tools.estimates.state_layout import (
    FORWARD_BACKWARD_STEP,
    Phase,
    Place,
    PlannedWorker,
    State,
    StateLayout,
    compute_width,
)

LIVE, PREFETCH = 1_000_000_000, 50_000_000
"""DeepSpeed's defaults of stage3_max_live_parameters and stage3_prefetch_bucket_size, in elements."""

MAIN_STAGES = 1
"""From this ZeRO stage the fp32 main weights are a copy even if the model is in fp32."""

WEIGHTS_STAGE, GRADIENTS_STAGE = 3, 2
"""ZeRO stages from which weights and gradients are sharded."""


def state_layout(config: RunConfig, worker: PlannedWorker) -> StateLayout:
    """Return the layout of the ZeRO stage: weights and gradients in `policy.precision`, fp32 main weights and moments.

    Main weights and moments are sharded from stage 1, gradients from 2, weights from 3. The step casts gradients to
    fp32. Buckets have `reduce_bucket_size` elements: stages 1 and 2 have two with `overlap_comm`, stage 3 keeps one and
    copies it to reduce it.
    """
    policy, section = config.policy, getattr(config.policy, "deepspeed", None) or DeepSpeedConfig()
    zero, width = zero_keys(policy, section, worker.device), compute_width(config)
    stage, shards = zero["stage"], config.worker_group.num_workers // policy.parallelism.tensor
    gathers = stage >= WEIGHTS_STAGE and policy.parallelism.tensor == 1
    live = zero.get("stage3_max_live_parameters", LIVE) + zero.get("stage3_prefetch_bucket_size", PREFETCH)
    bucket = min(zero.get("reduce_bucket_size", BUCKET), worker.trained) * width if stage else 0
    return StateLayout(
        _states(stage, shards, width, _is_offloaded(zero, "offload_param"), _is_offloaded(zero, "offload_optimizer")),
        transient=width if stage >= WEIGHTS_STAGE else (0 if policy.lora else width + 4),
        gathered=live if stage >= WEIGHTS_STAGE else None,
        gathers=stage >= WEIGHTS_STAGE,
        buffers=bucket if stage >= WEIGHTS_STAGE else 0,
        training_buffers=bucket * (2 if zero.get("overlap_comm") and stage < WEIGHTS_STAGE else 1),
        splits_ends=False,
        shares_model=not gathers and stage < WEIGHTS_STAGE and policy.parallelism.tensor == 1,
    )


def _states(stage: int, shards: int, width: int, weights_away: bool, optimizer_away: bool) -> tuple[State, ...]:
    of_optimizer, of_gradients, of_weights = (
        shards if stage >= first else 1 for first in (MAIN_STAGES, GRADIENTS_STAGE, WEIGHTS_STAGE)
    )
    optimizer: Place = "host" if optimizer_away else "device"
    gradients: Place = "host" if optimizer_away and stage >= GRADIENTS_STAGE else "device"
    updating: tuple[Phase, ...] = ("updating",)
    states = [
        State("weights", width, of_weights, place="host" if weights_away else "device"),
        State("gradients", width, of_gradients, trained=True, place=gradients, phases=_gradient_phases(stage)),
        State("moments", 8, of_optimizer, trained=True, place=optimizer),
    ]
    if stage >= MAIN_STAGES or width < 4:
        states += [
            State("main weights", 4, of_optimizer, trained=True, place=optimizer),
            State("fp32 gradients", 4, of_optimizer, trained=True, place=optimizer, phases=updating),
        ]
    return tuple(states)


def _gradient_phases(stage: int) -> tuple[Phase, ...]:
    """Stage 3 keeps the buffer of its gradients; the others free them."""
    return ("always",) if stage >= WEIGHTS_STAGE else FORWARD_BACKWARD_STEP


def _is_offloaded(zero: dict[str, Any], key: str) -> bool:
    return bool(zero.get(key, {}).get("device", "none") != "none")
