"""Plans for sharding a batch: the rows of each shard and, with dynamic batches or packing, of each microbatch.

The plans are pure functions of row lengths, made by `rlframework.batch.packing`; `BatchedDataDict.shard_by_batch_size`
executes them. The views of planned microbatches are slices; the data processor joins the tokens of a packed one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Generic, NotRequired, Self, TypedDict, TypeVar

import torch

from rlframework.base.errors import BatchError, BatchKeyError, BatchTypeError
from rlframework.batch.batch_rows import describe, is_integral, read_count, read_lengths, round_up
from rlframework.batch.packing import SequencePacker, balanced_microbatches, get_packer, round_robin_microbatches

if TYPE_CHECKING:
    from rlframework.batch.packing import PackingAlgorithm, TokenCost

MOST_SHARDS = 1 << 20
"""The most shards a batch may be split into; a larger number is surely a mistake, and would exhaust memory."""

# No `from __future__ import annotations` in this module: it would hide NotRequired from TypedDict.


class DynamicBatchingArgs(TypedDict):
    """Options for microbatches of rows of similar length, of at most `max_tokens_per_microbatch` tokens with padding.

    The length of each microbatch is rounded up to a multiple of `sequence_length_round`. `input_key` names the `[B, S]`
    tokens, `input_lengths_key` the `[B]` integer tensor of their lengths. `algorithm` is "round_robin" (default: the
    microbatches of all shards have the same shapes) or "balanced" (similar costs in each step and less padding; `cost`
    is the cost of a row). `group_ids_key` names a `[B]` integer tensor: rows with equal values share a microbatch, in
    the given order ("balanced" only).
    """

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: str
    input_lengths_key: str
    algorithm: NotRequired[str]
    cost: NotRequired["TokenCost | None"]
    group_ids_key: NotRequired[str]


class SequencePackingArgs(TypedDict):
    """Options for packing rows into microbatches of at most `max_tokens_per_microbatch` tokens.

    `algorithm` is a `PackingAlgorithm` or its name. Each row counts as its length rounded up to a multiple of
    `sequence_length_pad_multiple`. `microbatch_order` is "packer" (default: in the packer's order) or "largest_first".
    `cost` is the cost of a row; only "balanced" uses it. `group_ids_key` names a `[B]` integer tensor: rows with equal
    values share a microbatch, in the given order.
    """

    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    algorithm: "str | PackingAlgorithm"
    sequence_length_pad_multiple: int
    microbatch_order: NotRequired[str]
    cost: NotRequired["TokenCost | None"]
    group_ids_key: NotRequired[str]


Block = tuple[int, int]
"""Rows `[start, end)`."""
Ids = torch.Tensor | None
"""The group of each row, `[B]`; None if no rows need to stay together."""
Group = tuple[list[int], int]
"""The rows of one microbatch and its length: the padded length if dynamic, the total tokens if packed."""
Assign = Callable[[list[int], Ids], list[list[Group]]]
"""`assign(lengths, ids)` returns the microbatches of each shard for the rows of a global batch."""
T = TypeVar("T")


@dataclass(frozen=True)
class ShardPlan:
    """The plan of one shard: its rows and, for each of its global batches, which of them share a microbatch.

    It travels beside the rows, as `BatchedDataDict.plan`, and is never changed. `rows`: those of the whole batch, in
    the order of the shard; empty once they are in that order. A field that nobody has planned is None.
    """

    rows: Sequence[int] = ()
    micro_batch_indices: list[list[list[int]]] | None = None
    """For each global batch, the rows `[start, end]` of each microbatch, counted from the start of the global batch."""
    micro_batch_lengths: list[list[int]] | None = None
    """For each global batch, the padded length of each dynamic microbatch, or the tokens of each packed one."""
    elem_counts_per_gb: list[int] | None = None
    """The number of this shard's rows in each global batch."""
    micro_batch_input_key: str | None = None
    """The key of the `[B, S]` tokens that the microbatches were planned for."""

    @classmethod
    def of(cls, batches: Sequence[Sequence[Group]], starts: Iterable[int] = (0,), key: str = "input_ids") -> Self:
        """Return the plan of a shard with the microbatches `batches[k]` of global batch k, which begins at `starts[k]`.

        The rows of a microbatch are numbered from the start of its global batch.
        """
        ends = [[0, *accumulate(len(rows) for rows, _ in groups)] for groups in batches]
        return cls(
            [start + row for groups, start in zip(batches, starts, strict=True) for rows, _ in groups for row in rows],
            [[list(pair) for pair in pairwise(each)] for each in ends],
            [[length for _, length in groups] for groups in batches],
            [each[-1] for each in ends],
            key,
        )

    def microbatches(self) -> list[torch.Tensor]:
        """Return the rows of each microbatch, those of all global batches one after the other."""
        found, start = list[torch.Tensor](), 0
        order = torch.tensor(self.rows, dtype=torch.int64) if self.rows else None
        for ranges in self.micro_batch_indices or ():
            end = start + max((end for _, end in ranges), default=0)
            rows = torch.arange(start, end) if order is None else order[start:end]
            found += [rows[first:last] for first, last in ranges]
            start = end
        return found

    def global_batch(self, index: int) -> "ShardPlan":
        """Return the plan of one global batch, whose rows are in order."""
        counts, indices, lengths = self.elem_counts_per_gb, self.micro_batch_indices, self.micro_batch_lengths
        if indices is None or lengths is None:
            indices = lengths = None
        elif not index < len(indices) == len(lengths):
            raise BatchError(
                f"get_batch({index}): the batch has microbatch indices for {len(indices)} and lengths for "
                f"{len(lengths)} global batches, numbered from 0"
            )
        return ShardPlan(
            micro_batch_indices=indices and [indices[index]],
            micro_batch_lengths=lengths and [lengths[index]],
            elem_counts_per_gb=counts and [counts[index]],
            micro_batch_input_key=self.micro_batch_input_key,
        )


class PlanField(Generic[T]):
    """An attribute of a batch, by the name that NeMo-RL gives it, that is the field of its plan with this name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, batch: Any, owner: type | None = None) -> T | None:
        return None if batch is None or batch.plan is None else getattr(batch.plan, self._name)

    def __set__(self, batch: Any, value: T | None) -> None:
        batch.plan = replace(batch.plan or ShardPlan(), **{self._name: value})


def plain_blocks(size: int, shards: int, batch_size: int | None, allow_uneven_shards: bool) -> list[list[Block]]:
    """Return the blocks of each shard: its share of each global batch or, with uneven shards, one block of all rows."""
    _check_sizes(size, shards, batch_size, allow_uneven_shards, divide=not allow_uneven_shards)
    if allow_uneven_shards:
        each = -(-size // shards)
        return [[(min(shard * each, size), min((shard + 1) * each, size))] for shard in range(shards)]
    each = (batch_size or size) // shards
    return [
        [(start + shard * each, start + (shard + 1) * each) for start, _ in _global_batches(size, batch_size)]
        for shard in range(shards)
    ]


def plan_dynamic(
    data: Mapping[str, Any], size: int, shards: int, batch_size: int | None, uneven: bool, args: DynamicBatchingArgs
) -> list[ShardPlan]:
    """Plan dynamic microbatches. Except with "balanced", the rows of a global batch must be a multiple of `shards`."""
    _check_keys(args, DynamicBatchingArgs, "dynamic_batching_args")
    most, multiple = (read_count(args[key], key, 1) for key in ("max_tokens_per_microbatch", "sequence_length_round"))
    algorithm = args.get("algorithm", "round_robin")
    if algorithm not in ("round_robin", "balanced"):
        raise BatchError(f"the algorithm of dynamic_batching_args is {algorithm!r}; use round_robin or balanced")
    _check_sizes(size, shards, batch_size, uneven, divide=algorithm == "round_robin")
    lengths, width = _read_lengths(data, args["input_key"], args["input_lengths_key"])
    _check_cap([min(round_up(length, multiple), width) for length in lengths], lengths, most)
    ids = _read_group_ids(data, args.get("group_ids_key"), size)
    if ids is not None and algorithm != "balanced":
        raise BatchError(f"group_ids_key needs the algorithm balanced, got {algorithm!r}, which assigns single rows")

    key = args["input_key"]
    if algorithm == "balanced":
        return deal(
            lengths, ids, shards, batch_size, dynamic_groups(most, shards, multiple, width, args.get("cost")), key
        )

    def round_robin(lengths: list[int], _: Ids) -> list[list[Group]]:
        by_shard, bounds, longest = round_robin_microbatches(
            lengths, most, shards=shards, length_round=multiple, width=width
        )
        return [
            [(list(rows[start:end]), length) for (start, end), length in zip(bounds, longest, strict=True)]
            for rows in by_shard
        ]

    return deal(lengths, ids, shards, batch_size, round_robin, key)


def plan_packed(
    data: Mapping[str, Any], size: int, shards: int, batch_size: int | None, uneven: bool, args: SequencePackingArgs
) -> list[ShardPlan]:
    """Plan packed microbatches, the same number per shard, for any number of rows in a global batch."""
    _check_keys(args, SequencePackingArgs, "sequence_packing_args")
    most, multiple = (
        read_count(args[key], key, 1) for key in ("max_tokens_per_microbatch", "sequence_length_pad_multiple")
    )
    order = args.get("microbatch_order", "packer")
    if order not in ("packer", "largest_first"):
        raise BatchError(f"microbatch_order of sequence_packing_args is {order!r}; use packer or largest_first")
    _check_sizes(size, shards, batch_size, uneven, divide=False)
    packer = get_packer(args["algorithm"], most, min_bin_count=shards, bin_count_multiple=shards, cost=args.get("cost"))
    lengths, _ = _read_lengths(data, args["input_key"], args["input_lengths_key"])
    counted = [round_up(length, multiple) for length in lengths]
    _check_cap(counted, lengths, most)
    ids = _read_group_ids(data, args.get("group_ids_key"), size)

    assign = packed_groups(packer, shards)

    def largest_first(lengths: list[int], ids: Ids) -> list[list[Group]]:
        return [sorted(groups, key=lambda group: -group[1]) for groups in assign(lengths, ids)]

    key = args["input_key"]
    return deal(counted, ids, shards, batch_size, largest_first if order == "largest_first" else assign, key)


def dynamic_groups(most: int, shards: int, multiple: int, width: int, cost: "TokenCost | None") -> Assign:
    """Return the balanced assignment of rows to dynamic microbatches of at most `most` tokens, padding included."""

    def assign(lengths: list[int], ids: Ids) -> list[list[Group]]:
        by_shard = balanced_microbatches(
            lengths, most, shards=shards, length_round=multiple, width=width, cost=cost, group_ids=ids
        )
        return [[(rows, padded(rows, lengths)) for rows in groups] for groups in by_shard]

    def padded(rows: Sequence[int], lengths: list[int]) -> int:
        longest = max((lengths[row] for row in rows), default=0) or 1  # rows without tokens still take one column
        return min(round_up(longest, multiple), width)

    return assign


def packed_groups(packer: SequencePacker, shards: int) -> Assign:
    """Return the assignment of rows to the bins of `packer`, and of these to shards."""

    def assign(lengths: list[int], ids: Ids) -> list[list[Group]]:
        assigned = packer.assign_to_shards(packer.pack(lengths, ids), lengths, shards)
        return [[(rows, sum(lengths[row] for row in rows)) for rows in bins] for bins in assigned]

    return assign


def _check_sizes(size: int, shards: int, batch_size: int | None, allow_uneven_shards: bool, *, divide: bool) -> None:
    """Raise `BatchError` unless the batch divides into global batches and, with `divide`, these by the shards."""
    if not 1 <= shards <= MOST_SHARDS or (batch_size is not None and batch_size < 1):
        raise BatchError(
            f"{shards} shards with batch size {batch_size}: both must be at least 1, and shards at most {MOST_SHARDS}"
        )
    if allow_uneven_shards and batch_size is not None:
        raise BatchError(f"batch_size must be None if allow_uneven_shards is True, got {batch_size}")
    if batch_size is not None and size % batch_size:
        raise BatchError(f"Total batch size ({size}) is not a multiple of batch_size ({batch_size})")
    per_batch = size if batch_size is None else batch_size
    if divide and per_batch % shards:
        raise BatchError(
            f"Batch size ({per_batch}) is not a multiple of shards ({shards}): change one of them, or allow uneven "
            "shards with allow_uneven_shards=True (for dynamic batches: with the algorithm balanced)"
        )


def _read_lengths(data: Mapping[str, Any], input_key: str, lengths_key: str) -> tuple[list[int], int]:
    """Return the `[B]` lengths and the width of the `[B, S]` inputs."""
    for name, key in (("input_key", input_key), ("input_lengths_key", lengths_key)):
        if not isinstance(key, str):
            raise BatchTypeError(f"{name} must be a string, a key of the batch; got {key!r}")
        if key not in data:
            raise BatchKeyError(f"the batch has no {key!r}, the given {name}; it has {sorted(data, key=str)}")
    tokens = data[input_key]
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
        raise BatchTypeError(f"{input_key!r} must be a tensor [B, S] of tokens, got {describe(tokens)}")
    return read_lengths(data[lengths_key], tokens.shape[1], lengths_key, input_key), tokens.shape[1]


def _read_group_ids(data: Mapping[str, Any], key: str | None, size: int) -> Ids:
    """Return the `[B]` ids of the rows' groups; None without `key`."""
    if key is None:
        return None
    if key not in data:
        raise BatchKeyError(f"the batch has no {key!r}, the given group_ids_key; it has {sorted(data, key=str)}")
    ids = data[key]
    if not is_integral(ids) or ids.shape != (size,):
        raise BatchTypeError(
            f"{key!r} must be a tensor of {size} integers, the groups of the rows, got {describe(ids)}"
        )
    return ids


def _check_cap(counted: Sequence[int], lengths: Sequence[int], most: int) -> None:
    """Raise `BatchError` for a row that alone exceeds `most` tokens; `counted` are the lengths as rounded up."""
    if max(counted, default=0) > most:
        row = counted.index(max(counted))
        raise BatchError(
            f"row {row} has {lengths[row]} tokens, rounded up {counted[row]}, but max_tokens_per_microbatch is {most}: "
            "raise max_tokens_per_microbatch or shorten the row"
        )


def deal(
    lengths: list[int], ids: Ids, shards: int, batch_size: int | None, assign: Assign, key: str = "input_ids"
) -> list[ShardPlan]:
    """Return the plans of all shards, for which `assign` is called with each global batch of `batch_size` rows.

    `key`: see `ShardPlan.micro_batch_input_key`.
    """
    starts, by_shard = list[int](), [list[list[Group]]() for _ in range(shards)]
    for start, end in _global_batches(len(lengths), batch_size):
        starts.append(start)
        own = None if ids is None else ids[start:end]
        assigned = assign(lengths[start:end], own) if end > start else [[] for _ in by_shard]
        for batches, groups in zip(by_shard, assigned, strict=True):
            batches.append(groups)
    return [ShardPlan.of(batches, starts, key) for batches in by_shard]


def _global_batches(size: int, batch_size: int | None) -> list[Block]:
    if batch_size is None:
        return [(0, size)]
    return [(start, start + batch_size) for start in range(0, size, batch_size)]


def _check_keys(args: Any, kind: Any, name: str) -> None:
    if not isinstance(args, Mapping):
        raise BatchTypeError(f"{name} must be a dictionary with the keys of {kind.__name__}, got {describe(args)}")
    unknown, missing = set(args) - set(kind.__annotations__), kind.__required_keys__ - set(args)
    if unknown or missing:
        raise BatchKeyError(
            f"{name} lacks {sorted(missing)} and has unknown keys {sorted(map(str, unknown))}; "
            f"required: {sorted(kind.__required_keys__)}, optional: {sorted(kind.__optional_keys__)}"
        )


def planned_microbatches(
    indices: list[list[list[int]]] | None, lengths: list[list[int]] | None, size: int, caller: str
) -> tuple[list[list[int]], list[int]]:
    """Return row ranges and lengths of the microbatches of one global batch; raise `BatchError` for any other."""
    how = (
        "use get_batch(k), for each global batch k, of a shard of shard_by_batch_size(..., dynamic_batching_args=...) "
        "or shard_by_batch_size(..., sequence_packing_args=...)"
    )
    if indices is None or lengths is None:
        raise BatchError(
            f"{caller}: this batch has no microbatch metadata; {how}. slice, select_indices and other methods that "
            "make a new batch drop it"
        )
    if len(indices) != 1 or len(lengths) != 1:
        raise BatchError(
            f"{caller} needs one global batch, but this batch has the microbatches of {len(indices)}; {how}"
        )
    ends = [0, *(end for _, end in indices[0])]
    starts = [start for start, _ in indices[0]]
    if starts != ends[:-1] or ends != sorted(ends) or ends[-1] != size or len(lengths[0]) != len(starts):
        raise BatchError(
            f"{caller}: the microbatches {indices[0]} with lengths {lengths[0]} do not fit the batch of {size} rows, "
            f"which was changed since they were planned; {how}"
        )
    return indices[0], lengths[0]


def views(data: Mapping[str, Any], ranges: Iterable[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """Yield rows `[start, end)` of all values for each of the `ranges`, which must be valid."""
    values = list(data.items())  # values set or moved during the iteration are not seen
    return ({key: value[start:end] for key, value in values} for start, end in ranges)


def truncated_views(
    data: Mapping[str, Any],
    ranges: Sequence[Sequence[int]],
    lengths: Sequence[int],
    dim: int,
    input_key: str | None,
) -> Iterator[dict[str, Any]]:
    """As `views`, with sequences truncated to the length of the microbatch at dimension `dim`.

    Sequences are the tensors that are as wide there as `input_key`, which was planned for, or else as the widest.
    """
    widths = {k: v.shape[dim] for k, v in data.items() if isinstance(v, torch.Tensor) and v.ndim > dim > 0}
    names = (input_key, "input_ids")
    width = next((widths[name] for name in names if name in widths), max(widths.values(), default=0))
    longest = max(lengths, default=0)
    if width < longest or dim < 1:
        raise BatchError(
            f"the microbatches are up to {longest} wide at dimension {dim}, where the sequences are {width}; pass the "
            "`sequence_dim` that they were planned for, and do not truncate the batch after planning"
        )
    values = [(key, value, widths.get(key) == width) for key, value in data.items()]
    between = (slice(None),) * (dim - 1)

    def microbatch(start: int, end: int, length: int) -> dict[str, Any]:
        rows = slice(start, end)
        truncated = (rows, *between, slice(length))
        return {key: value[truncated if is_sequence else rows] for key, value, is_sequence in values}

    return (microbatch(start, end, length) for (start, end), length in zip(ranges, lengths, strict=True))
