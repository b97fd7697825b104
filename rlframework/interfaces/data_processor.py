"""The data-processor interface: global batches and microbatches, as a backend's model wants them.

The default, `rlframework.data.microbatches.MicrobatchProcessor`, serves every engine whose model takes rows of tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rlframework.distributed.batched_data_dict import BatchedDataDict


@dataclass(frozen=True)
class MicrobatchRule:
    """What an engine asks of the microbatches of a call.

    `count_multiple`, `count_minimum`: how many (a pipeline's schedule); `pad_multiple`: lengths are padded to a
    multiple of this (context and sequence parallelism).
    """

    count_multiple: int = 1
    count_minimum: int = 1
    pad_multiple: int = 1


@dataclass(frozen=True)
class BatchPlan:
    """How rows become microbatches: `mode` is padded, dynamic or packed; `tokens` caps the last two."""

    mode: str
    rows: int
    tokens: int


@dataclass
class Microbatch:
    """Some rows, ready for a forward.

    - `data`: the rows of the caller's batch, `[b, S']`, in which `S'` is the longest row of the microbatch;
    - `rows [b]` int64: where each row stands in the caller's batch;
    - `input_ids [n, L]`, `position_ids [n, L]`: what the model gets: `n = b` and `L = S'` (padded to the rule), or one
      packed row `n = 1`;
    - `cu_seqlens [b + 1]` int32, always on the CPU: bounds of the sequences in a packed row, None otherwise;
    - `head_positions [N]` int64: flat indices into `n * L` at which the head runs (where the next token is wanted);
    - `targets [N]` int64: the token after each of them;
    - `scatter [N]` int64: flat indices into `b * S'` where the value of each belongs (the position of the target);
    - `is_dummy`: repeats other rows so that all ranks run as many forwards; counts for nothing.
    """

    data: BatchedDataDict[Any]
    rows: torch.Tensor
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    head_positions: torch.Tensor
    targets: torch.Tensor
    scatter: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    is_dummy: bool = False


class DataProcessor(ABC):
    """Splits a worker's rows into microbatches."""

    @abstractmethod
    def microbatches(
        self, data: BatchedDataDict[Any], plan: BatchPlan, rule: MicrobatchRule, *, positions: str, device: torch.device
    ) -> Sequence[Microbatch]:
        """The rows of `data`, each at most once, in microbatches on `device`.

        `data` has `input_ids [B, S]`, `input_lengths [B]`. The head runs, with `positions`

        - `"all"`: at every token of a row but the last, so for every target;
        - `"token_mask"`: only for targets whose `token_mask [B, S]` is not 0; rows without any are left out;
        - `"loss"`: the same, and rows whose `sample_mask [B]` is 0 are left out.
        """
