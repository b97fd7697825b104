"""The mesh of a policy's workers and the process groups of its dimensions.

Dimensions, slowest-varying over the ranks first, as in `rlframework.interfaces.named_sharding.policy_sharding`:

    data_replicate x data_shard    rows are sharded over both; FSDP shards weights over `data_shard`, and HSDP keeps a
                                   replica per rank of `data_replicate`
    context_parallel               shards of each sequence; FSDP shards weights over it too
    tensor_parallel                shards of each weight and, with sequence parallelism, of the activations in between

With expert parallelism `data_shard` is two dimensions, `data_rest` x `expert`: the experts of a mixture are sharded
over `expert`, and FSDP shards them further over `data_rest` (see `experts`). Not supported: pipeline parallelism, and
expert parallelism together with HSDP or context or tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlframework.base.errors import ConfigError
from rlframework.engine import data_parallel_size

if TYPE_CHECKING:
    import torch.distributed as dist

    from rlframework.config.policy import ParallelismConfig

DIMENSIONS = ("data_replicate", "data_rest", "expert", "context_parallel", "tensor_parallel")


@dataclass(frozen=True)
class Sizes:
    """The number of ranks along each dimension; known without a process group."""

    data_replicate: int
    data_shard: int
    context: int
    tensor: int
    expert: int = 1

    @classmethod
    def of(cls, world_size: int, parallelism: ParallelismConfig, replicate: int = 1) -> Sizes:
        """Derive the sizes from the configuration; raise `ConfigError` if `world_size` does not factor."""
        data = data_parallel_size(world_size, parallelism)
        if data % replicate:
            raise ConfigError(
                f"policy.dtensor.replicate={replicate} does not divide {data}, the number of data-parallel "
                "workers; choose a divisor of it, or 1"
            )
        if problem := _expert_problem(data, replicate, parallelism):
            raise ConfigError(problem)
        return cls(replicate, data // replicate, parallelism.context, parallelism.tensor, parallelism.expert)

    @property
    def data(self) -> int:
        """Ranks that the rows are sharded over."""
        return self.data_replicate * self.data_shard

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which FSDP averages gradients: the mean times this is the sum over data and context."""
        return self.data * self.context


def _expert_problem(data: int, replicate: int, parallelism: ParallelismConfig) -> str | None:
    expert = parallelism.expert
    if expert > 1 and max(parallelism.context, parallelism.tensor, replicate) > 1:
        return (
            f"policy.parallelism.expert={expert} cannot be combined with policy.parallelism.context, "
            "policy.parallelism.tensor or policy.dtensor.replicate; set these to 1"
        )
    if data % expert:
        return (
            f"policy.parallelism.expert={expert} does not divide {data}, the number of data-parallel workers, "
            "over which experts are sharded; choose a divisor of it, or 1"
        )
    return None


class Mesh:
    """The mesh and its process groups. A group of a single rank is None.

    `fsdp`: the mesh for `fully_shard`, 1-D `(shard,)`, or 2-D `(data_replicate, shard)` for HSDP; `shard` is
    `data_shard` and `context_parallel` flattened. `tensor`: 1-D. `expert`: 1-D, the ranks that together hold the
    experts. `expert_fsdp`: 1-D, the ranks that share this rank's experts. The last three exist even with a single rank.
    """

    def __init__(self, sizes: Sizes, device_type: str) -> None:
        """Collective. The default process group must exist and have as many ranks as `sizes`."""
        self.sizes = sizes
        rest = sizes.data_shard // sizes.expert
        shape = (sizes.data_replicate, rest, sizes.expert, sizes.context, sizes.tensor)
        root = self._root = init_device_mesh(device_type, shape, mesh_dim_names=DIMENSIONS)
        shard = root["data_rest", "expert", "context_parallel"]._flatten("shard")
        self._data = root["data_replicate", "data_rest", "expert"]._flatten("data")
        self.expert: DeviceMesh = root["expert"]
        self.expert_fsdp: DeviceMesh = root["data_rest"]
        self._context = root["context_parallel"]
        self._shard = shard
        self.tensor: DeviceMesh = root["tensor_parallel"]
        replicated = sizes.data_replicate > 1
        self.fsdp: DeviceMesh = DeviceMesh._concatenate([root["data_replicate"], shard]) if replicated else shard

    def close(self) -> None:
        """Forget the process groups. Torch's caches keep meshes, which would keep the threads of each group running."""
        getattr(self._root, "_pg_registry", {}).clear()  # torch before 2.13 may have none: it finds groups by name

    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that rows are sharded over, at this rank's position on the other axes."""
        return _group(self._data)

    def context_group(self) -> dist.ProcessGroup | None:
        """The ranks with the other shards of this rank's sequences, in sequence order."""
        return _group(self._context)

    def tensor_group(self) -> dist.ProcessGroup | None:
        """The ranks with the other tensor-parallel shards of this rank's weights."""
        return _group(self.tensor)

    @property
    def tensor_rank(self) -> int:
        """Index of this rank's tensor-parallel shard of the weights."""
        return int(self.tensor.get_local_rank())

    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks over which FSDP shards this rank's share of each weight."""
        return _group(self._shard)


def _group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    return mesh.get_group() if mesh.size() > 1 else None
