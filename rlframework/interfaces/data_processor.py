"""The data-processor interface: global batches and microbatches in the form a backend's model takes.

The default, `rlframework.policy.microbatches.data_processor.MicrobatchProcessor`, works for every engine whose model
takes rows of tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from rlframework.base.errors import BatchError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.interfaces.loss import LossFunction


@dataclass(frozen=True)
class MicrobatchRule:
    """An engine's constraints on the microbatches of one call.

    `count_multiple`, `count_minimum`: constraints on their number, from a pipeline schedule. `pad_multiple`: sequence
    lengths are padded to a multiple of this, for context and sequence parallelism. `few_shapes`: rows and lengths are
    padded further, so that model inputs have one of few shapes; a GPU's kernels and allocator keep something for each.
    `packs_media`: rows with media may be packed.
    """

    count_multiple: int = 1
    count_minimum: int = 1
    pad_multiple: int = 1
    few_shapes: bool = False
    packs_media: bool = False


@dataclass(frozen=True)
class BatchPlan:
    """How rows are grouped into microbatches.

    `mode` is "padded", with `rows` rows per microbatch, or "dynamic" or "packed", with at most `tokens` tokens.
    `groups`: rows with equal `group_ids` share a microbatch.
    """

    mode: str
    rows: int
    tokens: int
    groups: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("padded", "dynamic", "packed"):
            raise BatchError(f"unknown batching mode {self.mode!r}; use padded, dynamic or packed")
        if (size := self.rows if self.mode == "padded" else self.tokens) < 1:
            what = "rows" if self.mode == "padded" else "tokens"
            raise BatchError(f"{what} of a {self.mode} microbatch must be at least 1, got {size}")


@dataclass
class ProcessedInputs:
    """The inputs of a model's forward for one microbatch, named as in NeMo-RL.

    - `input_ids [n, L]` int64 and `seq_len` = L: `n` right-padded rows, or one packed row (`n = 1`);
    - `attention_mask`: `[n, L]` of ones, or None; under causal attention, padding on the right needs no mask;
    - `position_ids [n, L]` int64, which restart at 0 with each sequence of a packed row; None if the model computes its
      own;
    - `flash_attn_kwargs`: boundaries of the sequences in a packed row, for kernels that take them; `{}` otherwise;
    - `vlm_kwargs`: images and other media, in the order of the rows, under the names of the model's forward; types of
      tokens are `[1, L]` for a packed row;
    - `cp_buffers`, `seq_index [1, L]`: tensors that torch's context parallelism shards in place. The context
      parallelism of this framework does not use them.
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
        """Whether torch's context parallelism has buffers to shard."""
        return len(self.cp_buffers) > 0

    @property
    def has_flash_attention(self) -> bool:
        """Whether the boundaries of packed sequences are set."""
        return bool(self.flash_attn_kwargs)

    @property
    def is_multimodal(self) -> bool:
        """Whether the model gets inputs other than text."""
        return len(self.vlm_kwargs) > 0


@dataclass
class ProcessedMicrobatch:
    """Rows and the model inputs made from them. `original_*`: the shape of `data_dict["input_ids"]` before packing."""

    data_dict: BatchedDataDict[Any]
    processed_inputs: ProcessedInputs
    original_batch_size: int
    original_seq_len: int


@dataclass
class Microbatch(ProcessedMicrobatch):
    """Rows of a worker's batch, ready for a forward pass, and the positions at which the head runs.

    - `data_dict`: the rows, `[b, S']`, where `S'` is the longest row of the microbatch;
    - `processed_inputs`: `[n, L]` with `n = b` and `L = S'` padded as the rule requires, or one packed row; rows that
      `MicrobatchRule.few_shapes` adds come last, and no head runs on them;
    - `rows [b]` int64: the index of each row in the worker's batch;
    - `cu_seqlens [b + 1]` int32, always on the CPU: cumulative lengths of the sequences in a packed row, None
      otherwise. Padding that the rule adds at the end of the row counts as one more sequence: `[b + 2]`;
    - `head_positions [N]` int64: flat indices into `n * L` at which the head runs, the positions that predict a target;
    - `targets [N]` int64: the target token of each of them; `[N, 1 + K]` with the tokens of a set after it, where
      workers have added sets (`rlframework.policy.microbatches.model_inputs`);
    - `scatter [N]` int64: flat indices into `b * S'` to which the results are scattered, the positions of the targets;
    - `is_dummy`: True if the microbatch only repeats rows, so that all ranks run the same number of forward passes;
      it contributes to no result;
    - `host`: the microbatch in CPU memory that this is a copy of, for an engine that needs values without waiting for
      the device; None if this one is in CPU memory.

    `data_dict`, `head_positions`, `targets` and `scatter` are on the worker's device, as are `input_ids`,
    `position_ids` and `vlm_kwargs` of `processed_inputs`; `rows` and `cu_seqlens` are on the CPU. Every call of an
    engine has at least one microbatch. A microbatch may have no head positions (N = 0).
    """

    rows: torch.Tensor
    head_positions: torch.Tensor
    targets: torch.Tensor
    scatter: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    is_dummy: bool = False
    host: Microbatch | None = None


class GlobalBatch(TypedDict):
    """This rank's rows of a global batch, and the counts that losses are divided by.

    The counts are 0-dim fp32 tensors, summed over the data-parallel ranks: `global_valid_seqs` is the sum of
    `sample_mask [B]`, `global_valid_toks` that of `token_mask[:, 1:] * sample_mask[:, None]` (nothing predicts the
    first token).
    """

    batch: BatchedDataDict[Any]
    global_valid_seqs: torch.Tensor
    global_valid_toks: torch.Tensor


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
    ) -> GlobalBatch:
        """Return this rank's rows of a global batch, `data.get_batch(batch_idx, batch_size)`, and its counts.

        `batch_size` is the number of this rank's rows (None: as the driver assigned, `elem_counts_per_gb`). The counts
        are summed over `dp_group` (None: this rank only).
        """

    @abstractmethod
    def microbatches(
        self, data: BatchedDataDict[Any], plan: BatchPlan, rule: MicrobatchRule, *, positions: str, device: torch.device
    ) -> Sequence[Microbatch]:
        """Split the rows of `data`, each used at most once, into microbatches on `device`.

        The sequence may make a microbatch when it is asked for. Workers ask for microbatches in CPU memory, and copy
        each to their device when the engine runs it.

        `data` has `input_ids [B, S]` and `input_lengths [B]`. If it carries `micro_batch_indices` of one global batch,
        keep those microbatches: the driver has balanced their cost over the ranks. `positions` selects where the head
        runs:

        - `"all"`: at every token of a row except the last, that is, for every target;
        - `"token_mask"`: only for targets with nonzero `token_mask [B, S]`; rows without any are left out;
        - `"loss"`: like `"token_mask"`, but rows whose `sample_mask [B]` is 0 are left out too;
        - `"last"`: at the last token of each row, which is its own target; rows without tokens are left out;
        - `"loss_last"`: like `"last"`, but rows whose `sample_mask [B]` is 0 are left out too.

        With `plan.groups`, rows of `data` with equal `group_ids [B]` are a group. A microbatch has all rows of its
        groups, next to each other and in the order of `data`. A group is left out only if all of its rows would be;
        no head runs for the others of its rows that would be. `micro_batch_indices` are kept in the mode "padded" too.
        A group that does not fit into a microbatch of the plan is a `BatchError`, and so are planned microbatches that
        divide one.
        """
