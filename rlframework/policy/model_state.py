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
    """AdamW's state of one weight, whole: how many steps it took, and both moments in fp32."""

    steps: int
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True)
class Piece:
    """This rank's part of the tensor `name`: `local` lies at `offset` in the whole, which is of `shape`."""

    name: str
    local: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def value(self) -> Tensor:
        """What is written. A piece that is not in memory yet overrides this, and has a `local` on the meta device."""
        return self.local

    @property
    def index(self) -> MetadataIndex:
        """How DCP calls it."""
        return MetadataIndex(self.name, torch.Size(self.offset))

    def write_item(self) -> WriteItem:
        """What DCP is told of it."""
        chunk = ChunkStorageMetadata(torch.Size(self.offset), self.local.shape)
        data = TensorWriteData(chunk, TensorProperties(dtype=self.local.dtype), torch.Size(self.shape))
        return WriteItem(index=self.index, type=WriteItemType.SHARD, tensor_data=data)


@dataclass(frozen=True)
class ShardedState:
    """What an engine holds on this rank: pieces of the weights, and of the moments named as in the portable form.

    They share the memory of what is trained. `steps`: those of the optimizer by weight, of the weights that are here.
    `moments` and `steps` are empty where there is no optimizer.
    """

    weights: Sequence[Piece]
    moments: Sequence[Piece] = ()
    steps: Mapping[str, int] = field(default_factory=dict)
