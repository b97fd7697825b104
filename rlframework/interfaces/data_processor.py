"""The data-processor interface: global batches and microbatches, as a backend's model wants them.

The default, `rlframework.microbatches.data_processor.MicrobatchProcessor`, serves every engine whose model takes rows
of tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlframework.errors import BatchError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.interfaces.loss import LossFunction


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
    """How rows become microbatches: `mode` is padded, of `rows` each, or dynamic or packed, of at most `tokens`."""

    mode: str
    rows: int
    tokens: int

    def __post_init__(self) -> None:
        if self.mode not in ("padded", "dynamic", "packed"):
            raise BatchError(f"batching mode {self.mode!r} is unknown; take padded, dynamic or packed")
        if (size := self.rows if self.mode == "padded" else self.tokens) < 1:
            what = "rows" if self.mode == "padded" else "tokens"
            raise BatchError(f"a {self.mode} microbatch of {size} {what} is no work; the least is 1")


@dataclass
class ProcessedInputs:
    """What a model's forward gets of one microbatch. The names are NeMo-RL's.

    - `input_ids [n, L]` int64 and `seq_len` = L: `n` rows padded on the right, or one packed row (`n = 1`);
    - `attention_mask`: `[n, L]` of ones, or None: under causal attention padding on the right needs no mask;
    - `position_ids [n, L]` int64; they start again with each sequence of a packed row. None: the model makes its own;
    - `flash_attn_kwargs`: bounds of the sequences in a packed row, for kernels that take them; `{}` otherwise;
    - `vlm_kwargs`: images and the like, as the model's forward names them;
    - `cp_buffers`, `seq_index [1, L]`: what torch's context parallelism splits in place. Our own does not use them.
    """

    input_ids: torch.Tensor
    seq_len: int
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    flash_attn_kwargs: Any = field(default_factory=dict)
    vlm_kwargs: dict[str, Any] = field(default_factory=dict)
    cp_buffers: list[torch.Tensor] = field(default_factory=list)
    seq_index: torch.Tensor | None = None

    @property
    def has_context_parallel(self) -> bool:
        """Whether there is something for torch's context parallelism to split."""
        return len(self.cp_buffers) > 0

    @property
    def has_flash_attention(self) -> bool:
        """Whether the bounds of packed sequences are there."""
        return bool(self.flash_attn_kwargs)

    @property
    def is_multimodal(self) -> bool:
        """Whether there is more than text."""
        return len(self.vlm_kwargs) > 0


@dataclass
class ProcessedMicrobatch:
    """Rows, and what the model gets of them. `original_*`: the shape of `data_dict["input_ids"]`, before packing."""

    data_dict: BatchedDataDict[Any]
    processed_inputs: ProcessedInputs
    original_batch_size: int
    original_seq_len: int


@dataclass
class Microbatch(ProcessedMicrobatch):
    """Some rows of a worker's batch, ready for a forward, and where the head runs.

    - `data_dict`: the rows, `[b, S']`, in which `S'` is the longest row of the microbatch;
    - `processed_inputs`: `[n, L]` with `n = b` and `L = S'` (padded to the rule), or one packed row;
    - `rows [b]` int64: where each row stands in the worker's batch;
    - `cu_seqlens [b + 1]` int32, always on the CPU: bounds of the sequences in a packed row, None otherwise. Padding at
      the end of the row, where the rule asks for it, is one more sequence: `[b + 2]`;
    - `head_positions [N]` int64: flat indices into `n * L` at which the head runs (where the next token is wanted);
    - `targets [N]` int64: the token after each of them;
    - `scatter [N]` int64: flat indices into `b * S'` where the value of each belongs (the position of the target);
    - `is_dummy`: repeats other rows so that all ranks run as many forwards; counts for nothing.

    On the worker's device are `data_dict`, `head_positions`, `targets`, `scatter`, and of `processed_inputs`
    `input_ids`, `position_ids` and `vlm_kwargs`; `rows` and `cu_seqlens` are on the CPU. A call of an engine
    has one microbatch at least, and one may have no position (N = 0).
    """

    rows: torch.Tensor
    head_positions: torch.Tensor
    targets: torch.Tensor
    scatter: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    is_dummy: bool = False


class DataProcessor(ABC):
    """Splits a worker's rows into global batches and microbatches."""

    @abstractmethod
    def process_global_batch(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        dp_group: ProcessGroup | None,
        *,
        batch_idx: int,
        batch_size: int | None,
    ) -> dict[str, Any]:
        """This rank's rows of the `batch_idx`-th global batch, and what losses are divided by.

        `batch`: `data.get_batch(batch_idx, batch_size)`, so `batch_size` are this rank's rows of it (None: as many as
        the driver dealt for it, `elem_counts_per_gb`). `global_valid_seqs`: the sum of `sample_mask [B]`;
        `global_valid_toks`: that of `token_mask[:, 1:] * sample_mask` (nothing predicts the first token);
        0-dimensional fp32, both summed over `dp_group` (None: this rank alone).
        """

    @abstractmethod
    def microbatches(
        self, data: BatchedDataDict[Any], plan: BatchPlan, rule: MicrobatchRule, *, positions: str, device: torch.device
    ) -> Sequence[Microbatch]:
        """The rows of `data`, each at most once, in microbatches on `device`.

        `data` has `input_ids [B, S]`, `input_lengths [B]`. Where it carries `micro_batch_indices` of one global batch,
        the driver has dealt the rows to ranks so that these microbatches cost alike: they are kept. The head runs, with
        `positions`

        - `"all"`: at every token of a row but the last, so for every target;
        - `"token_mask"`: only for targets whose `token_mask [B, S]` is not 0; rows without any are left out;
        - `"loss"`: the same, and rows whose `sample_mask [B]` is 0 are left out;
        - `"last"`: at the last token of each row, which is its own target; rows without a token are left out.
        """
