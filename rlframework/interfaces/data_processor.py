"""The data-processor interface: global batches and microbatches in the form a backend's model takes.

The default, `rlframework.policy.microbatches.data_processor.MicrobatchProcessor`, works for every engine whose model
takes rows of tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from rlframework.base.errors import BatchError
from rlframework.config.policy import BatchingConfig
from rlframework.plugins.discovery import load_target

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.batch.packing import TokenCost
    from rlframework.batch.sharding import ShardPlan
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

    `mode`: the name of a `Batching`. Padded microbatches have at most `rows` rows, dynamic and packed ones at most
    `tokens` tokens. `groups`: rows with equal `group_ids` share a microbatch.
    """

    mode: str
    rows: int
    tokens: int
    groups: bool = False


@dataclass(frozen=True)
class RowsToPlan:
    """The rows of `data` that are computed, `wanted [B]` bool, and with `group_ids [B]` the group of each row."""

    data: BatchedDataDict[Any]
    wanted: torch.Tensor
    group_ids: torch.Tensor | None = None

    @property
    def lengths(self) -> torch.Tensor:
        """`[B]`: the tokens of each row, 0 if it is not computed."""
        lengths: torch.Tensor = self.data["input_lengths"] * self.wanted
        return lengths.long()


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


class Batching(ABC):
    """A mode of `policy.batching`: which rows share a microbatch, and the microbatch that is made of them.

    Driver and workers ask it, with the `name` of the mode and the section `policy.batching`. `rule` is that of the
    engine. The modes of core are in `rlframework.policy.microbatches.modes`.
    """

    def __init__(self, name: str, config: BatchingConfig) -> None:
        self.name, self.config = name, config

    def fits(self, data: BatchedDataDict[Any], rule: MicrobatchRule) -> str:
        """Return why an engine with `rule` cannot compute the rows of `data` in this mode; empty if it can."""
        return ""

    def for_rows(self, data: BatchedDataDict[Any], rule: MicrobatchRule) -> Batching:
        """Return the mode that `auto` takes for `data`: this one, or another if the rows do not fit."""
        return self

    @abstractmethod
    def limits(
        self, rows: RowsToPlan, rule: MicrobatchRule, *, most_rows: int, tokens: int | None, preferred: int
    ) -> BatchPlan:
        """Return the limits of a microbatch: `most_rows` rows or `tokens` tokens.

        Without `tokens`, these are `preferred`, or more if a row or a group of rows is longer.
        """

    @abstractmethod
    def check(self, rows: RowsToPlan, limits: BatchPlan, rule: MicrobatchRule) -> None:
        """Raise `BatchError` if a row, or a group of rows, is in no microbatch within the `limits`."""

    @abstractmethod
    def plan(self, rows: RowsToPlan, limits: BatchPlan, rule: MicrobatchRule) -> ShardPlan:
        """Return the microbatches of a rank that has all `rows`; those that are not computed are in none."""

    def plan_ranks(
        self,
        rows: RowsToPlan,
        limits: BatchPlan,
        rule: MicrobatchRule,
        *,
        ranks: int,
        batch_size: int | None,
        cost: TokenCost,
    ) -> Sequence[ShardPlan] | None:
        """Return the plan of each of several ranks: which rows it has, and which of these share a microbatch.

        Every `batch_size` rows (None: all) are one global batch. All ranks have the same number of microbatches, of
        similar `cost`, and together all rows. None: they get the rows in order, and each makes a plan of its own.
        """
        return None

    def keeps_plan(self, limits: BatchPlan) -> bool:
        """Whether a worker keeps the microbatches that the driver has planned."""
        return True

    @abstractmethod
    def make(
        self, data: BatchedDataDict[Any], rows: torch.Tensor, limits: BatchPlan, rule: MicrobatchRule, positions: str
    ) -> Microbatch:
        """Make the microbatch of `rows [b]` of `data`; see `DataProcessor.microbatches` for `positions`."""


class DataProcessor(ABC):
    """Splits a worker's rows into global batches and microbatches. `config`: the section `policy.batching`."""

    modes: ClassVar[Mapping[str, type[Batching] | str]] = {
        "padded": "rlframework.policy.microbatches.modes:Padded",
        "dynamic": "rlframework.policy.microbatches.modes:Dynamic",
        "packed": "rlframework.policy.microbatches.modes:Packed",
    }
    """The class of each mode, or its import path `module:Class`."""

    def __init__(self, config: BatchingConfig | None = None) -> None:
        self.config = config or BatchingConfig()

    def batching(self, mode: str) -> Batching:
        """Return the mode of this name; raise `BatchError` if there is none."""
        if mode not in self.modes:
            *others, last = self.modes
            raise BatchError(f"unknown batching mode {mode!r}; use {', '.join(others)} or {last}")
        target = self.modes[mode]
        batching: type[Batching] = load_target(target) if isinstance(target, str) else target
        return batching(mode, self.config)

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

        `data` has `input_ids [B, S]` and `input_lengths [B]`. If it has a `plan` with `micro_batch_indices`, keep those
        microbatches: the driver has balanced their cost over the ranks. `positions` selects where the head runs:

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
