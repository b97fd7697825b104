"""The ranks of a policy by axes, the first varying slowest: data x context x tensor, as everywhere in the framework.

ZeRO deals out over data and context together, as DeepSpeed sees it: all ranks that do not share a weight by tensor
parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlframework.interfaces.named_sharding import data_parallel_size

if TYPE_CHECKING:
    import torch.distributed as dist

    from rlframework.config.policy import ParallelismConfig


@dataclass(frozen=True)
class Sizes:
    """How many ranks along each axis."""

    data: int
    context: int
    tensor: int

    @classmethod
    def of(cls, world_size: int, parallelism: ParallelismConfig) -> Sizes:
        """What `world_size` ranks make of the configuration; a `ConfigError` where they do not factor."""
        return cls(data_parallel_size(world_size, parallelism), parallelism.context, parallelism.tensor)


class Groups:
    """The groups of this rank; None where it would be alone."""

    def __init__(self, sizes: Sizes, device_type: str) -> None:
        """Collective; the default process group is there and has as many ranks as `sizes` says."""
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
