"""The parallel axes of a policy, slowest first: data x context x tensor, as everywhere in the framework.

ZeRO shards over data and context together, that is, over all ranks that are not tensor-parallel to each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlframework.engine import data_parallel_size

if TYPE_CHECKING:
    import torch.distributed as dist

    from rlframework.config.policy import ParallelismConfig


@dataclass(frozen=True)
class Sizes:
    """The number of ranks along each axis."""

    data: int
    context: int
    tensor: int

    @classmethod
    def of(cls, world_size: int, parallelism: ParallelismConfig) -> Sizes:
        """Factor `world_size` ranks as configured; raise `ConfigError` if they do not factor."""
        return cls(data_parallel_size(world_size, parallelism), parallelism.context, parallelism.tensor)


class Groups:
    """This rank's process groups; None for groups of one rank."""

    def __init__(self, sizes: Sizes, device_type: str) -> None:
        """Create the groups from the default process group, whose size matches `sizes`. Collective."""
        from torch.distributed.device_mesh import init_device_mesh

        self.sizes = sizes
        self.data: dist.ProcessGroup | None = None
        self.context: dist.ProcessGroup | None = None
        if sizes.context == sizes.data == 1:
            return
        names = ("data", "context", "tensor")
        mesh = init_device_mesh(device_type, (sizes.data, sizes.context, sizes.tensor), mesh_dim_names=names)
        self.data = mesh.get_group("data") if sizes.data > 1 else None
        self.context = mesh.get_group("context") if sizes.context > 1 else None
