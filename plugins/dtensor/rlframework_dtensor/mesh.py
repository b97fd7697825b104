"""The one mesh of a policy's workers, and the groups over it that the rest of the backend works with.

Dimensions, the first varying slowest over the ranks, as in `rlframework.interfaces.named_sharding.policy_sharding`:

    data_replicate x data_shard    rows are dealt over both; FSDP shards weights over `data_shard`, and HSDP holds a
                                   copy in each of `data_replicate`
    context_parallel               parts of each sequence; FSDP shards weights over it too
    tensor_parallel                parts of each weight and, with sequence parallelism, of the activations in between

With expert parallelism `data_shard` is two dimensions, `data_rest` x `expert`: the ranks of `expert` hold the experts
of a mixture together, and FSDP shards them over `data_rest` (see `experts`). Left out: pipeline parallelism, and expert
parallelism beside the other axes of a model or HSDP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlframework.errors import ConfigError
from rlframework.interfaces.named_sharding import data_parallel_size

if TYPE_CHECKING:
    import torch.distributed as dist

    from rlframework.config.policy import ParallelismConfig

DIMENSIONS = ("data_replicate", "data_rest", "expert", "context_parallel", "tensor_parallel")


@dataclass(frozen=True)
class Sizes:
    """How many ranks along each dimension; known without a process group."""

    data_replicate: int
    data_shard: int
    context: int
    tensor: int
    expert: int = 1

    @classmethod
    def of(cls, world_size: int, parallelism: ParallelismConfig, replicate: int = 1) -> Sizes:
        """What `world_size` ranks make of the configuration; a `ConfigError` where they do not factor."""
        data = data_parallel_size(world_size, parallelism)
        if data % replicate:
            raise ConfigError(
                f"policy.dtensor.replicate={replicate} does not divide {data}, the number of workers that share the "
                "rows; choose a divisor of it, or 1"
            )
        if problem := _spread_problem(data, replicate, parallelism):
            raise ConfigError(problem)
        return cls(replicate, data // replicate, parallelism.context, parallelism.tensor, parallelism.expert)

    @property
    def data(self) -> int:
        """Ranks that share the rows."""
        return self.data_replicate * self.data_shard

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which FSDP takes the MEAN of gradients: times this it is the sum over data and context."""
        return self.data * self.context


def _spread_problem(data: int, replicate: int, parallelism: ParallelismConfig) -> str | None:
    expert = parallelism.expert
    if expert > 1 and max(parallelism.context, parallelism.tensor, replicate) > 1:
        return (
            f"policy.parallelism.expert={expert} goes with none of policy.parallelism.context, "
            "policy.parallelism.tensor and policy.dtensor.replicate; set these to 1"
        )
    if data % expert:
        return (
            f"policy.parallelism.expert={expert} does not divide {data}, the number of workers that share the rows, "
            "over which experts are spread; choose a divisor of it, or 1"
        )
    return None


class Mesh:
    """The mesh and its groups. Groups of one rank are None: there is nobody to talk to.

    `fsdp`: what `fully_shard` takes, 1-D `(shard,)`, or 2-D `(data_replicate, shard)` for HSDP; `shard` is `data_shard`
    and `context_parallel` flattened. `tensor`: 1-D, also of size 1. `expert`: 1-D, the ranks that hold the experts
    together, and `expert_fsdp`, 1-D, those that share this rank's; both also of size 1.
    """

    def __init__(self, sizes: Sizes, device_type: str) -> None:
        """Collective; the default process group is there and has as many ranks as `sizes` says."""
        self.sizes = sizes
        rest = sizes.data_shard // sizes.expert
        shape = (sizes.data_replicate, rest, sizes.expert, sizes.context, sizes.tensor)
        root = init_device_mesh(device_type, shape, mesh_dim_names=DIMENSIONS)
        shard = root["data_rest", "expert", "context_parallel"]._flatten("shard")
        self._data = root["data_replicate", "data_rest", "expert"]._flatten("data")
        self.expert: DeviceMesh = root["expert"]
        self.expert_fsdp: DeviceMesh = root["data_rest"]
        self._context = root["context_parallel"]
        self._shard = shard
        self.tensor: DeviceMesh = root["tensor_parallel"]
        replicated = sizes.data_replicate > 1
        self.fsdp: DeviceMesh = DeviceMesh._concatenate([root["data_replicate"], shard]) if replicated else shard

    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the rows and stand where this one does on the other axes."""
        return _group(self._data)

    def context_group(self) -> dist.ProcessGroup | None:
        """The ranks with the other parts of this rank's sequences, in the order of the parts."""
        return _group(self._context)

    @property
    def context_rank(self) -> int:
        """Which part of the sequences this rank has."""
        return int(self._context.get_local_rank())

    def tensor_group(self) -> dist.ProcessGroup | None:
        """The ranks with the other parts of this rank's weights."""
        return _group(self.tensor)

    @property
    def tensor_rank(self) -> int:
        """Which part of the weights this rank has."""
        return int(self.tensor.get_local_rank())

    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks over which FSDP shards what this rank holds of each weight."""
        return _group(self._shard)


def _group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    return mesh.get_group() if mesh.size() > 1 else None
