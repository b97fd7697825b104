"""Megatron-core's process groups, created from the worker's context and `policy.parallelism`.

Ranks are laid out as in `rlframework.interfaces.named_sharding.policy_sharding`: the pipeline varies slowest, then
data, context and tensor parallelism. Experts are distributed across neighbours on the data axis. Megatron-core keeps
its groups in global variables, so all policies of a process share one layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rlframework.base.errors import ConfigError
from rlframework.engine import data_parallel_size, process_groups
from rlframework_megatron.upstream import parallel_state, random_states

if TYPE_CHECKING:
    from rlframework.config.policy import ParallelismConfig
    from rlframework.engine import WorkerContext


@dataclass(frozen=True)
class Sizes:
    """The number of ranks along each axis; `virtual`: model chunks per pipeline stage, 1 without interleaving."""

    data: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    virtual: int = 1
    sequence: bool = False

    @classmethod
    def of(cls, world_size: int, parallelism: ParallelismConfig, virtual: int = 1) -> Sizes:
        """Factor `world_size` ranks as configured; raise `ConfigError` if they do not factor."""
        data = data_parallel_size(world_size, parallelism)
        if data % parallelism.expert:
            raise ConfigError(
                f"policy.parallelism.expert={parallelism.expert} does not divide {data}, the number of data-parallel "
                "workers that the experts are spread over; choose a divisor of it, or 1"
            )
        return cls(
            data,
            parallelism.tensor,
            parallelism.context,
            parallelism.pipeline,
            parallelism.expert,
            virtual,
            parallelism.sequence,
        )


_users = 0
_sizes: Sizes | None = None


class Groups:
    """This rank's process groups, for one policy."""

    def __init__(self, context: WorkerContext, device: torch.device, sizes: Sizes) -> None:
        """Create the default process group and megatron-core's groups unless they exist. Collective."""
        global _users, _sizes  # as megatron-core's are
        if _users and _sizes != sizes:
            raise ConfigError(
                f"this process already has a megatron-core policy with {_sizes} and cannot have another with {sizes}, "
                "because megatron-core's groups are global; run each policy in its own processes"
            )
        process_groups.join(context, device)
        if not _users:
            _make(sizes, context.deadline)
            _sizes = sizes
        _users += 1
        self.sizes, self.device = sizes, device

    @staticmethod
    def leave() -> None:
        """Release the groups; the last user destroys them."""
        global _users, _sizes
        _users -= 1
        if not _users:
            _destroy()
            _sizes = None
        process_groups.leave()

    @property
    def data(self) -> dist.ProcessGroup | None:
        """The data-parallel ranks; None if there is only one."""
        return parallel_state.get_data_parallel_group() if self.sizes.data > 1 else None

    @property
    def tensor(self) -> dist.ProcessGroup | None:
        """The ranks with the other shards of this rank's weights; None if there is only one."""
        return parallel_state.get_tensor_model_parallel_group() if self.sizes.tensor > 1 else None

    @property
    def tensor_rank(self) -> int:
        """The index of this rank's shard of the weights."""
        return int(parallel_state.get_tensor_model_parallel_rank())

    @property
    def context(self) -> dist.ProcessGroup | None:
        """The ranks with the other shards of this rank's sequences; None if there is only one."""
        return parallel_state.get_context_parallel_group() if self.sizes.context > 1 else None

    @property
    def pipeline(self) -> dist.ProcessGroup | None:
        """The stages of this rank's pipeline, in order; None if there is only one."""
        return parallel_state.get_pipeline_model_parallel_group() if self.sizes.pipeline > 1 else None

    @property
    def pipeline_rank(self) -> int:
        """The pipeline stage of this rank."""
        return int(parallel_state.get_pipeline_model_parallel_rank())

    @property
    def last_stage(self) -> int:
        """The global rank of the last stage of this rank's pipeline."""
        return int(parallel_state.get_pipeline_model_parallel_last_rank())


def _destroy() -> None:
    """Destroy the groups, which megatron-core only drops, so that their threads do not outlive them."""
    groups = [group for group in parallel_state._global_process_group_list or () if group is not None]
    parallel_state.destroy_model_parallel()
    if dist.get_world_size() > 1:
        dist.barrier()  # no rank may still be communicating
    for group in groups:
        dist.destroy_process_group(group)


def _make(sizes: Sizes, deadline: float) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        distributed_timeout_minutes=max(1, math.ceil(deadline / 60)),
        create_gloo_process_groups=False,
    )
    # without dropout nothing is sampled, so no separate random states are needed
    random_states.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
