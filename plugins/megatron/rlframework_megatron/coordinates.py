"""A rank's coordinates along the axes that shard a model.

Coordinates are plain numbers, so any rank can compute what any other rank holds. Does not cover data and context
parallelism, whose ranks hold the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlframework.base.errors import ConfigError


@dataclass(frozen=True)
class Coordinates:
    """A rank's coordinates: tensor ranks split each layer, pipeline ranks (stages) the model, expert ranks the experts.

    `chunks`: model chunks per stage (above 1: interleaved). Virtual stage `c * stages + p` of the model, in layer
    order, is chunk `c` of stage `p`. `padded_vocabulary`: rows of Megatron's whole embedding; 0: the next multiple of
    `tensor_size`. `layers`: the number of layers of each virtual stage; empty: equal numbers. `fused`: the layers are
    Transformer Engine's, which name some parameters differently.
    """

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1
    chunks: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor_rank: int = 0
    expert_tensor_size: int = 1
    padded_vocabulary: int = 0
    layers: tuple[int, ...] = ()
    fused: bool = False

    @property
    def virtual_stages(self) -> int:
        """The number of virtual stages of the pipeline: stages times chunks."""
        return self.pipeline_size * self.chunks

    def stage_of(self, virtual_stage: int) -> int:
        """The pipeline rank that holds a virtual stage."""
        return virtual_stage % self.pipeline_size

    def holds(self, virtual_stage: int) -> bool:
        """Whether this rank holds a virtual stage."""
        return self.stage_of(virtual_stage) == self.pipeline_rank

    def chunk_of(self, virtual_stage: int) -> int:
        """The index of a virtual stage among the chunks of its rank."""
        return virtual_stage // self.pipeline_size

    def first_layers(self, layers: int) -> list[int]:
        """The first layer of each virtual stage, followed by the total number of `layers`."""
        if not self.layers and layers % self.virtual_stages:
            raise ConfigError(
                f"{layers} layers are not divisible by {self.virtual_stages} virtual stages "
                f"(policy.parallelism.pipeline={self.pipeline_size}, {self.chunks} chunks per stage); "
                f"choose numbers whose product divides {layers}"
            )
        counts = self.layers or (layers // self.virtual_stages,) * self.virtual_stages
        if len(counts) != self.virtual_stages or sum(counts) != layers:
            raise ConfigError(
                f"layer counts {counts} do not split {layers} layers into {self.virtual_stages} virtual stages"
            )
        return [sum(counts[:number]) for number in range(len(counts) + 1)]

    def vocabulary(self, rows: int) -> int:
        """The number of rows of the padded embedding for a vocabulary of `rows` tokens."""
        padded = self.padded_vocabulary or rows + -rows % self.tensor_size
        if padded < rows or padded % self.tensor_size:
            raise ConfigError(
                f"a vocabulary of {rows} tokens cannot be padded to {padded} rows over {self.tensor_size} tensor ranks"
            )
        return padded

    def at_tensor_rank(self, rank: int) -> Coordinates:
        """The coordinates of tensor rank `rank` (also for experts), unchanged along the other axes."""
        return replace(self, tensor_rank=rank % self.tensor_size, expert_tensor_rank=rank % self.expert_tensor_size)
