"""Which part of a model a rank holds: its coordinates along the axes that cut a model. Numbers only.

Any rank can work out what any other one holds by the `Place` of that one. Left out: data and context parallelism,
whose ranks hold the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlframework.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """A rank's coordinates: tensor ranks share each layer, pipeline ranks (stages) layers, expert ranks the experts.

    `chunks`: pieces of the pipeline that each stage holds (interleaved where it is over 1). Piece `c * stages + p` of
    the model, in the order of its layers, is chunk `c` of stage `p`. `padded_vocabulary`: rows of the whole embedding
    as Megatron makes it; 0: as few as divide by `tensor_size`. `layers`: those of each piece; empty: equally many.
    `fused`: the layers are Transformer Engine's, which name some parameters otherwise.
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
    def pieces(self) -> int:
        """Of the pipeline, over all stages."""
        return self.pipeline_size * self.chunks

    def stage_of(self, piece: int) -> int:
        """The pipeline rank that has it."""
        return piece % self.pipeline_size

    def here(self, piece: int) -> bool:
        """Whether this rank has it."""
        return self.stage_of(piece) == self.pipeline_rank

    def chunk_of(self, piece: int) -> int:
        """Which of its stage's chunks it is."""
        return piece // self.pipeline_size

    def first_layers(self, layers: int) -> list[int]:
        """The layer that each piece begins with, and the number of all `layers` at the end."""
        if not self.layers and layers % self.pieces:
            raise ConfigError(
                f"{layers} layers do not divide over {self.pieces} pieces of the pipeline (policy.parallelism.pipeline="
                f"{self.pipeline_size}, {self.chunks} chunks a stage); choose numbers whose product divides {layers}"
            )
        counts = self.layers or (layers // self.pieces,) * self.pieces
        if len(counts) != self.pieces or sum(counts) != layers:
            raise ConfigError(f"pieces of {counts} layers are no split of {layers} layers into {self.pieces} pieces")
        return [sum(counts[:number]) for number in range(len(counts) + 1)]

    def vocabulary(self, rows: int) -> int:
        """Rows of the padded embedding of a vocabulary of `rows`."""
        padded = self.padded_vocabulary or rows + -rows % self.tensor_size
        if padded < rows or padded % self.tensor_size:
            raise ConfigError(
                f"a vocabulary of {rows} tokens cannot be padded to {padded} rows over {self.tensor_size} tensor ranks"
            )
        return padded

    def at_tensor_rank(self, rank: int) -> Place:
        """The place of tensor rank `rank`, for experts too, which is the same along the other axes."""
        return replace(self, tensor_rank=rank % self.tensor_size, expert_tensor_rank=rank % self.expert_tensor_size)
