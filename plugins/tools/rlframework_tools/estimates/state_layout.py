"""How much memory a training engine keeps for each parameter, for estimates before a run. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlframework.config.sections import RunConfig

Place = Literal["device", "host"]
Phase = Literal["always", "generating", "scoring", "training", "updating"]
"""When memory is in use; `training`: forward and backward; `updating`: the optimizer's step."""

FORWARD_BACKWARD_STEP: tuple[Phase, ...] = ("training", "updating")
"""The phases in which gradients exist."""


@dataclass(frozen=True)
class State:
    """Tensors that a worker keeps for the parameters of its part of the model.

    The part is what tensor, pipeline and expert parallelism leave to the worker. `width`: bytes per parameter;
    `shards`: the number of workers with the same part over which the tensors are sharded, and `expert_shards` those of
    experts (None: the same). `trained`: only for parameters that are trained. `matrices`: False if the matrices of
    layers have none, see `rlframework.policy.optimization.layer_matrices`.
    """

    name: str
    width: float
    shards: int = 1
    expert_shards: int | None = None
    trained: bool = False
    matrices: bool = True
    place: Place = "device"
    phases: tuple[Phase, ...] = ("always",)


@dataclass(frozen=True)
class StateLayout:
    """The memory that an engine keeps on a worker. The first of `states` are the weights that its forward reads.

    `transient`: bytes per parameter of the unit that is computed, a block or the head: whole weights and gradients
    that exist only then. `gathers`: the weights are whole only then. `gathered`: at most this many parameters are
    gathered at once (None: those of a unit). `buffers`, `training_buffers`: bytes of buffers for communication that
    exist always, or in training. `splits_ends`: tensor parallelism shards embedding and head too. `shares_model`:
    generation in the worker uses the weights of training. `assumed`: the backend does not say any of this.
    """

    states: tuple[State, ...]
    transient: float = 0.0
    gathers: bool = False
    gathered: int | None = None
    buffers: int = 0
    training_buffers: int = 0
    splits_ends: bool = True
    shares_model: bool = False
    assumed: bool = False


@dataclass(frozen=True)
class PlannedWorker:
    """A worker of a run that is estimated: "cpu" or "cuda", the model's trained parameters, its GPU's memory."""

    device: str
    trained: int
    gpu_bytes: int | None = None


def compute_width(config: RunConfig) -> int:
    """Bytes per number of `policy.precision`."""
    return 4 if config.policy.precision == "float32" else 2


def assumed_layout(config: RunConfig, worker: PlannedWorker) -> StateLayout:
    """The layout of a backend that declares none: fp32 weights, gradients and moments, sharded over all workers."""
    parallelism, width = config.policy.parallelism, compute_width(config)
    shards = max(1, config.worker_group.num_workers // (parallelism.tensor * parallelism.pipeline))
    over = shards, max(1, shards // parallelism.expert)
    plain = config.worker_group.num_workers == 1 and width == 4
    offload = config.policy.offload
    return StateLayout(
        (
            State("weights", 4, *over, place="host" if offload.parameters else "device"),
            State("gradients", 4, *over, trained=True, phases=FORWARD_BACKWARD_STEP),
            State("moments", 8, *over, trained=True, place="host" if offload.optimizer else "device"),
        ),
        transient=0 if plain else 3 * width + 4,
        gathers=not plain,
        shares_model=plain,
        assumed=True,
    )
