"""Values that describe a model's state: weight shapes, optimizer moments, and one rank's shards of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class WeightSpec:
    """Shape and dtype of a whole weight, known without gathering it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Moments:
    """AdamW's state of one whole weight: its number of steps, and both moments in fp32."""

    steps: int
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True)
class TensorShard:
    """This rank's shard of the tensor `name` of shape `shape`: `local`, at `offset` in the whole tensor."""

    name: str
    local: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def value(self) -> Tensor:
        """Return the data to write.

        A shard that is not in memory yet overrides this, and has a `local` on the meta device.
        """
        return self.local

    @property
    def index(self) -> MetadataIndex:
        """The identifier of the shard in torch's distributed checkpoint (DCP)."""
        return MetadataIndex(self.name, torch.Size(self.offset))

    def write_item(self) -> WriteItem:
        """Return the description of the shard for DCP."""
        chunk = ChunkStorageMetadata(torch.Size(self.offset), self.local.shape)
        data = TensorWriteData(chunk, TensorProperties(dtype=self.local.dtype), torch.Size(self.shape))
        return WriteItem(index=self.index, type=WriteItemType.SHARD, tensor_data=data)


@dataclass(frozen=True)
class ShardedState:
    """An engine's state on this rank: shards of the weights, and of the moments, named as in the portable form.

    The shards share the memory that is trained. `steps`: optimizer steps by name, of the weights that this rank has
    shards of. `moments` and `steps` are empty without an optimizer.
    """

    weights: Sequence[TensorShard]
    moments: Sequence[TensorShard] = ()
    steps: Mapping[str, int] = field(default_factory=dict)
