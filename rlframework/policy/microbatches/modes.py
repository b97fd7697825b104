"""The batching modes of core: padded, dynamic and packed microbatches.

Each groups the rows of one rank, and deals those of a batch to several ranks so that no rank waits for another. All
index arithmetic is vectorized.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlframework.base.errors import BatchError
from rlframework.batch.batch_rows import round_up
from rlframework.batch.packed_tensor import has_media
from rlframework.batch.packing import RowGroups, balanced_microbatches, get_packer
from rlframework.batch.packing.lengths import Ints
from rlframework.batch.sharding import Assign, ShardPlan, deal, dynamic_groups, packed_groups
from rlframework.interfaces.data_processor import Batching, BatchPlan, Microbatch, MicrobatchRule, RowsToPlan
from rlframework.policy.microbatches.data_processor import make_microbatch
from rlframework.policy.microbatches.shapes import Padding

if TYPE_CHECKING:
    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.batch.packing import TokenCost


class RowBatching(Batching):
    """A mode whose microbatches are padded rows, or with `packed` one packed row.

    A subclass groups rows by their lengths. `limited`: what `BatchPlan` limits, by the configuration key `key`.
    """

    packed: ClassVar[bool] = False
    limited: ClassVar[str] = "tokens"
    key: ClassVar[str] = "policy.batching.tokens"

    @abstractmethod
    def group(self, lengths: list[int], ids: Tensor | None, limits: BatchPlan, rule: MicrobatchRule) -> list[list[int]]:
        """Return indices into `lengths`, which are those of the rows to compute, by microbatch.

        Rows with equal `ids` share one, next to each other and in order.
        """

    @abstractmethod
    def needed(self, groups: RowGroups, lengths: Ints, rule: MicrobatchRule) -> Ints:
        """Return `[groups]`: the rows or tokens of a microbatch that each group needs; 0 if it is not computed."""

    def capacity(self, limits: BatchPlan, rule: MicrobatchRule) -> int:
        """Return the most rows or tokens of a microbatch, without padding at its end."""
        return limits.tokens

    def room_for_groups(self, groups: RowGroups, lengths: Ints, rule: MicrobatchRule) -> int:
        """Return the tokens of a microbatch that has room for each group."""
        return 0

    def dealt(
        self, rows: RowsToPlan, limits: BatchPlan, rule: MicrobatchRule, ranks: int, cost: TokenCost
    ) -> tuple[Tensor, Assign] | None:
        """Return what deals rows to several ranks, and the lengths that it reads; None: rows are dealt in order."""
        return None

    def padding(self, limits: BatchPlan, rule: MicrobatchRule) -> Padding:
        """Return the padding of microbatches within the `limits`."""
        tokens = limits.tokens if self.limited == "tokens" else None
        return Padding(rule.pad_multiple, rule.few_shapes, tokens, limits.groups)

    def limits(
        self, rows: RowsToPlan, rule: MicrobatchRule, *, most_rows: int, tokens: int | None, preferred: int
    ) -> BatchPlan:
        """See `Batching.limits`."""
        if tokens is None:
            lengths = rows.lengths
            tokens = max(preferred, Padding(rule.pad_multiple, rule.few_shapes).width(int(lengths.max())))
            if rows.group_ids is not None:
                groups = RowGroups.of(rows.group_ids, len(lengths))
                tokens = max(tokens, self.room_for_groups(groups, lengths.cpu().numpy(), rule))
        return BatchPlan(self.name, most_rows, tokens, rows.group_ids is not None)

    def check(self, rows: RowsToPlan, limits: BatchPlan, rule: MicrobatchRule) -> None:
        """See `Batching.check`."""
        if (size := limits.rows if self.limited == "rows" else limits.tokens) < 1:
            raise BatchError(f"{self.limited} of a {self.name} microbatch must be at least 1, got {size}")
        if not bool(rows.wanted.any()):
            return
        lengths = rows.lengths
        longest = self.padding(limits, rule).width(int(lengths.max()))
        if self.limited == "tokens" and longest > limits.tokens:
            raise BatchError(
                f"a row has {longest} tokens, but a {self.name} microbatch may have {limits.tokens}; raise "
                f"{self.key} (policy.batching.logprob_tokens for scoring) or shorten the rows"
            )
        if rows.group_ids is not None:
            groups = RowGroups.of(rows.group_ids, len(lengths))
            needed = self.needed(groups, lengths.cpu().numpy(), rule)
            groups.require(needed, self.capacity(limits, rule), self.limited, self.key)

    def plan(self, rows: RowsToPlan, limits: BatchPlan, rule: MicrobatchRule) -> ShardPlan:
        """See `Batching.plan`."""
        numbers: list[int] = rows.wanted.nonzero()[:, 0].tolist()
        if not numbers:
            return ShardPlan()
        lengths: list[int] = rows.data["input_lengths"][rows.wanted].tolist()
        ids = None if rows.group_ids is None else rows.group_ids[rows.wanted]
        groups = self.group(lengths, ids, limits, rule)
        planned = [([numbers[row] for row in group], sum(lengths[row] for row in group)) for group in groups]
        return ShardPlan.of([planned])

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
        """See `Batching.plan_ranks`."""
        if (dealt := self.dealt(rows, limits, rule, ranks, cost)) is None:
            return None
        lengths, assign = dealt
        return deal(lengths.tolist(), rows.group_ids, ranks, batch_size, assign)

    def make(
        self, data: BatchedDataDict[Any], rows: Tensor, limits: BatchPlan, rule: MicrobatchRule, positions: str
    ) -> Microbatch:
        """See `Batching.make`."""
        padding = self.padding(limits, rule)
        return make_microbatch(data, rows, packed=self.packed, positions=positions, padding=padding)


class Padded(RowBatching):
    """A fixed number of rows, in order."""

    limited = "rows"
    key = "policy.train_micro_batch_size"

    def group(self, lengths: list[int], ids: Tensor | None, limits: BatchPlan, rule: MicrobatchRule) -> list[list[int]]:
        """See `RowBatching.group`."""
        return get_packer("concatenative", limits.rows).pack([1] * len(lengths), ids)

    def needed(self, groups: RowGroups, lengths: Ints, rule: MicrobatchRule) -> Ints:
        """See `RowBatching.needed`."""
        return np.where(groups.largest(lengths) > 0, groups.sizes, 0)

    def capacity(self, limits: BatchPlan, rule: MicrobatchRule) -> int:
        """See `RowBatching.capacity`."""
        return limits.rows

    def dealt(
        self, rows: RowsToPlan, limits: BatchPlan, rule: MicrobatchRule, ranks: int, cost: TokenCost
    ) -> tuple[Tensor, Assign] | None:
        """See `RowBatching.dealt`: groups are dealt by their number of rows."""
        if rows.group_ids is None:
            return None
        return rows.wanted.to(torch.int64), _packed(limits.rows, ranks, cost)

    def keeps_plan(self, limits: BatchPlan) -> bool:
        """See `Batching.keeps_plan`: only groups are planned."""
        return limits.groups


class Dynamic(RowBatching):
    """Rows of similar length, up to a number of tokens including padding."""

    def group(self, lengths: list[int], ids: Tensor | None, limits: BatchPlan, rule: MicrobatchRule) -> list[list[int]]:
        """See `RowBatching.group`."""
        padding = self.padding(limits, rule)
        if ids is not None:
            padding = replace(padding, few=False)
        return balanced_microbatches([padding.width(length) for length in lengths], limits.tokens, group_ids=ids)[0]

    def needed(self, groups: RowGroups, lengths: Ints, rule: MicrobatchRule) -> Ints:
        """See `RowBatching.needed`."""
        longest: Ints = groups.largest(lengths)
        return groups.sizes * (-(-longest // rule.pad_multiple) * rule.pad_multiple)

    def room_for_groups(self, groups: RowGroups, lengths: Ints, rule: MicrobatchRule) -> int:
        """See `RowBatching.room_for_groups`."""
        return int(groups.sizes.max()) * round_up(int(lengths.max()), rule.pad_multiple)

    def dealt(
        self, rows: RowsToPlan, limits: BatchPlan, rule: MicrobatchRule, ranks: int, cost: TokenCost
    ) -> tuple[Tensor, Assign] | None:
        """See `RowBatching.dealt`."""
        lengths, most, columns = rows.lengths, limits.tokens, rows.data["input_ids"].shape[1]
        if rule.few_shapes and rows.group_ids is None:
            padding = self.padding(limits, rule)
            widths = torch.tensor([min(padding.width(length), columns) for length in lengths.tolist()])
            # the planner knows no rows wider than the batch
            most = most * columns // max(padding.width(int(lengths.max())), columns)
            lengths = widths.where(lengths > 0, 0)
        return lengths, dynamic_groups(most, ranks, rule.pad_multiple, columns, cost)


class Packed(RowBatching):
    """Rows concatenated without padding, up to a number of tokens."""

    packed = True

    def fits(self, data: BatchedDataDict[Any], rule: MicrobatchRule) -> str:
        """See `Batching.fits`."""
        if rule.packs_media or not has_media(data):
            return ""
        media = sorted(data.get_multimodal_dict())
        return f"multimodal rows ({media}) cannot be packed; set policy.batching.mode to dynamic or padded"

    def for_rows(self, data: BatchedDataDict[Any], rule: MicrobatchRule) -> Batching:
        """See `Batching.for_rows`."""
        return Dynamic("dynamic", self.config) if self.fits(data, rule) else self

    def group(self, lengths: list[int], ids: Tensor | None, limits: BatchPlan, rule: MicrobatchRule) -> list[list[int]]:
        """See `RowBatching.group`."""
        return get_packer("balanced", self.capacity(limits, rule)).pack(lengths, ids)

    def needed(self, groups: RowGroups, lengths: Ints, rule: MicrobatchRule) -> Ints:
        """See `RowBatching.needed`."""
        return groups.sums(lengths)

    def capacity(self, limits: BatchPlan, rule: MicrobatchRule) -> int:
        """See `RowBatching.capacity`."""
        return limits.tokens - limits.tokens % rule.pad_multiple

    def room_for_groups(self, groups: RowGroups, lengths: Ints, rule: MicrobatchRule) -> int:
        """See `RowBatching.room_for_groups`."""
        return round_up(int(groups.sums(lengths).max()), rule.pad_multiple)

    def dealt(
        self, rows: RowsToPlan, limits: BatchPlan, rule: MicrobatchRule, ranks: int, cost: TokenCost
    ) -> tuple[Tensor, Assign] | None:
        """See `RowBatching.dealt`."""
        return rows.lengths, _packed(self.capacity(limits, rule), ranks, cost)


def _packed(most: int, ranks: int, cost: TokenCost) -> Assign:
    packer = get_packer("balanced", most, min_bin_count=ranks, bin_count_multiple=ranks, cost=cost)
    return packed_groups(packer, ranks)
