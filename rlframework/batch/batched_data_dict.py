"""`BatchedDataDict`: a dictionary whose values have one row per sample, and the operations on such batches.

Names and arguments follow NeMo-RL. Operations on one value are in `batch_rows`, the plans for sharding in `sharding`.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

import torch

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework.batch import batch_rows, sharding
from rlframework.batch.batch_rows import describe, read_count
from rlframework.batch.packed_tensor import PackedTensor, picklable
from rlframework.batch.sharding import DynamicBatchingArgs as DynamicBatchingArgs
from rlframework.batch.sharding import SequencePackingArgs as SequencePackingArgs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DictT = TypeVar("DictT", bound=Mapping[str, Any])
"""The keys, for a type checker: `BatchedDataDict[MyTypedDict]`. Not checked at run time."""

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


class BatchedDataDict(UserDict[str, Any], Generic[DictT]):
    """Tensors with the batch on dimension 0, lists with one element per row, and `PackedTensor`s, by name.

    Setting a value checks nothing. Methods that need all values to have the same number of rows check that, and raise
    `BatchError`. Elements of lists and rows of PackedTensors are passed by reference, not copied, except for lists in
    `repeat_interleave`.

    Microbatch metadata survives pickling and `get_batch`. Every other method that returns a new batch drops it, and the
    iterators that need it raise an error that says so. Sending a batch to another process drops gradients: see
    `rlframework.batch.packed_tensor`.
    """

    plan: sharding.ShardPlan | None = None
    """The plan by which `shard_by_plan` cut this shard; the four attributes below are its fields."""
    micro_batch_indices = sharding.PlanField[list[list[list[int]]]]()
    micro_batch_lengths = sharding.PlanField[list[list[int]]]()
    elem_counts_per_gb = sharding.PlanField[list[int]]()
    micro_batch_input_key = sharding.PlanField[str]()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(f'{key} {describe(value)}' for key, value in self.items())}>"

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[Any, Any]],
        pad_value_dict: Mapping[str, float] | None = None,
        *,
        allow_missing_packed_tensors: bool = False,
    ) -> Self:
        """Join the rows of all batches, in order, under the sorted union of their keys.

        Lists, PackedTensors and 1-D tensors are joined. Tensors of more dimensions are padded on the right of dimension
        1 to the longest, with `pad_value_dict[key]` or 0. A batch with rows that lacks a key raises `BatchKeyError` (a
        `KeyError`) naming key and batch; with `allow_missing_packed_tensors`, a missing PackedTensor counts as rows
        without media instead. Without batches, returns an empty dictionary.
        """
        if isinstance(batches, Mapping) or not all(isinstance(batch, Mapping) for batch in batches):
            raise BatchTypeError("from_batches takes a list of batches (dictionaries)")
        sizes = [batch_rows.count_rows(batch, f"batch {position}") for position, batch in enumerate(batches)]
        joined = cls()
        for key in sorted({key for batch in batches for key in batch}, key=str):
            known = batch_rows.collect_values(key, batches, sizes, fill_packed=allow_missing_packed_tensors)
            joined.data[key] = batch_rows.concatenate(key, known, (pad_value_dict or {}).get(key, 0))
        return joined

    @property
    def size(self) -> int:
        """The number of rows of the first key; 0 without keys."""
        for key, value in self.data.items():
            return len(batch_rows.as_rows(key, value))
        return 0

    def all_gather(self, group: ProcessGroup | None = None) -> Self:
        """Gather the rows of all ranks of `group`, in rank order, on every rank; ranks may hold any number of rows."""
        from rlframework.batch.collectives import all_gather_batch

        return type(self)(all_gather_batch(self.data, group))

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict[DictT]:
        """Return a copy of the `rank`-th of `chunks` equal, contiguous shards."""
        size = batch_rows.count_rows(self.data)
        rank, chunks = read_count(rank, "rank"), read_count(chunks, "chunks")
        if chunks < 1 or not 0 <= rank < chunks:
            raise BatchError(f"chunk {rank} of {chunks}: `chunks` must be at least 1 and `rank` in 0..{chunks - 1}")
        if size % chunks:
            raise BatchError(f"batch of {size} rows is not a multiple of {chunks} chunks")
        length = size // chunks
        return self._copy_blocks([(rank * length, (rank + 1) * length)])

    def reorder_data(self, reorded_indices: Sequence[int] | torch.Tensor) -> None:
        """Sort the rows in place by `reorded_indices`: the row at position p has sort key `reorded_indices[p]`.

        With the indices returned by `shard_by_batch_size`, this restores the order of the input in the joined outputs
        of the shards. Rows with equal keys keep their order. Microbatch metadata is not changed.
        """
        size = batch_rows.count_rows(self.data)
        keys = batch_rows.as_integers("reorder_data", reorded_indices)
        if keys.ndim != 1 or len(keys) != size:
            raise BatchError(f"reorder_data got indices of shape {list(keys.shape)} for a batch of {size} rows")
        order = torch.argsort(keys, stable=True)
        self.data.update({key: batch_rows.pick_rows(value, order) for key, value in self.data.items()})

    @overload
    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, allow_uneven_shards: bool = False
    ) -> list[SlicedDataDict[DictT]]: ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        *,
        dynamic_batching_args: DynamicBatchingArgs,
    ) -> tuple[list[SlicedDataDict[DictT]], list[int]]: ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        *,
        sequence_packing_args: SequencePackingArgs,
    ) -> tuple[list[SlicedDataDict[DictT]], list[int]]: ...

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[SlicedDataDict[DictT]] | tuple[list[SlicedDataDict[DictT]], list[int]]:
        """Split each global batch, `batch_size` consecutive rows (None: all rows), evenly over `shards`.

        Each shard holds its share of global batch 0, then of global batch 1, and so on: eight rows over two shards with
        `batch_size` 4 give rows 0, 1, 4, 5 and 2, 3, 6, 7. With `allow_uneven_shards` (without `batch_size`), shards
        have `ceil(rows / shards)` rows; the last ones may have fewer or none. Tensors are copied, each byte once.

        With `dynamic_batching_args` or `sequence_packing_args`, the rows of each global batch are assigned by length to
        microbatches of at most `max_tokens_per_microbatch` tokens, the same number on every shard. Only round-robin
        dynamic batching needs a number of rows that is a multiple of `shards`. The shards carry microbatch metadata:
        the iterators of `shard.get_batch(k)` yield the microbatches of global batch k. Returns `(shards, indices)`:
        `indices[p]` is the input row at position p of the joined shards (all of shard 0, then shard 1, ...), so that
        `reorder_data(indices)` on joined outputs restores the order of the input.
        """
        size = batch_rows.count_rows(self.data)
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise BatchError(
                "dynamic_batching_args and sequence_packing_args cannot be passed together; pass one of them"
            )
        shards = read_count(shards, "shards")
        batch_size = None if batch_size is None else read_count(batch_size, "batch_size")
        planned = (self.data, size, shards, batch_size, allow_uneven_shards)
        if dynamic_batching_args is not None:
            plans = sharding.plan_dynamic(*planned, dynamic_batching_args)
            return self.shard_by_plan(plans)
        if sequence_packing_args is not None:
            plans = sharding.plan_packed(*planned, sequence_packing_args)
            return self.shard_by_plan(plans)
        return [self._copy_blocks(blocks) for blocks in sharding.plain_blocks(*planned[1:])]

    def shard_by_plan(self, plans: Sequence[sharding.ShardPlan]) -> tuple[list[SlicedDataDict[DictT]], list[int]]:
        """Return the shards of `plans`, with their plans, and the indices that restore the order of the rows."""
        shards = []
        for plan in plans:
            rows = torch.tensor(plan.rows, dtype=torch.int64)
            shard = _sliced({key: batch_rows.pick_rows(value, rows) for key, value in self.data.items()})
            shard.plan = replace(plan, rows=())
            shards.append(shard)
        return shards, [row for plan in plans for row in plan.rows]

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict[DictT]:
        """Return views of rows `[batch_idx * batch_size, (batch_idx + 1) * batch_size)`, with microbatch metadata.

        Dynamic and packed shards take the number of rows from `elem_counts_per_gb` instead and ignore `batch_size`.
        """
        counts, batch_idx = self.elem_counts_per_gb, read_count(batch_idx, "batch_idx")
        if counts is not None:
            if not 0 <= batch_idx < len(counts):
                raise BatchError(f"get_batch({batch_idx}): there are {len(counts)} global batches, numbered from 0")
            start = sum(counts[:batch_idx])
            batch = self.slice(start, start + counts[batch_idx])
        else:
            if batch_size is None or (batch_size := read_count(batch_size, "batch_size")) < 1 or batch_idx < 0:
                raise BatchError(
                    f"get_batch({batch_idx}, {batch_size}): `batch_idx` must be at least 0 and `batch_size` at least 1"
                )
            batch = self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)
        batch.plan = None if self.plan is None else self.plan.global_batch(batch_idx)
        return batch

    def slice(self, start: int, end: int) -> SlicedDataDict[DictT]:
        """Return rows `[start, end)`: tensors as views, lists as new lists."""
        size = batch_rows.count_rows(self.data)
        start, end = read_count(start, "start"), read_count(end, "end")
        if not 0 <= start <= end <= size:
            raise BatchError(f"slice({start}, {end}) of a batch of {size} rows: 0 <= start <= end <= {size} must hold")
        return _sliced({key: value[start:end] for key, value in self.data.items()})

    def repeat_interleave(self, num_repeats: int, *, share_immutable_media: bool = False) -> Self:
        """Repeat each row `num_repeats` times consecutively; elements of lists are deep copies.

        PackedTensors raise `BatchTypeError` (a `NotImplementedError`) unless `share_immutable_media` is set: then the
        repeats of a row share its media, including media inside elements of lists.
        """
        batch_rows.count_rows(self.data)
        num_repeats = read_count(num_repeats, "num_repeats")
        if not 0 <= num_repeats < 1 << 31:
            raise BatchError(f"repeat_interleave({num_repeats}): the number of repeats must be in 0..2**31 - 1")
        return type(self)(
            {
                key: batch_rows.repeat_rows(key, value, num_repeats, share_media=share_immutable_media)
                for key, value in self.data.items()
            }
        )

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Truncate every tensor that has dimension `dim` to `truncated_len` entries there, in place, as views."""
        dim, truncated_len = read_count(dim, "dim"), read_count(truncated_len, "truncated_len")
        if dim < 0 or truncated_len < 0:
            raise BatchError(f"truncate_tensors(dim={dim}, truncated_len={truncated_len}): both must be at least 0")
        tensors = {k: v for k, v in self.data.items() if isinstance(v, torch.Tensor) and v.ndim > dim}
        short = {key: tuple(tensor.shape) for key, tensor in tensors.items() if tensor.shape[dim] < truncated_len}
        if short:
            raise BatchError(f"truncate_tensors(dim={dim}, truncated_len={truncated_len}): shorter tensors: {short}")
        for key, tensor in tensors.items():
            self.data[key] = tensor.narrow(dim, 0, truncated_len)

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict[DictT]]:
        """Yield views of `microbatch_size` rows, in order; the number of rows must be a multiple of it."""
        size = batch_rows.count_rows(self.data)
        microbatch_size = read_count(microbatch_size, "microbatch_size")
        if microbatch_size < 1 or size % microbatch_size:
            raise BatchError(
                f"batch of {size} rows is not a multiple of the microbatch size {microbatch_size} (at least 1)"
            )
        ranges = ((start, start + microbatch_size) for start in range(0, size, microbatch_size))
        return map(_sliced, sharding.views(self.data, ranges))

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[SlicedDataDict[DictT]]:
        """Yield the microbatches planned by `shard_by_batch_size(dynamic_batching_args=...)`, truncated, as views.

        The batch must be one global batch: a result of `get_batch`, or a shard that has only one. Tensors whose
        `sequence_dim` is as wide as the planned input are truncated there to the length of the microbatch; others, such
        as `[B, 3]`, are not.
        """
        dim, key = read_count(sequence_dim, "sequence_dim"), self.micro_batch_input_key
        planned = self._planned("make_microbatch_iterator_with_dynamic_shapes")
        return map(_sliced, sharding.truncated_views(self.data, *planned, dim, key))

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Return the number of microbatches of `make_microbatch_iterator_with_dynamic_shapes`."""
        return len(self._planned("get_microbatch_iterator_dynamic_shapes_len")[0])

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict[DictT]]:
        """Yield the rows of each pack planned by `shard_by_batch_size(sequence_packing_args=...)`, unjoined, as views.

        The batch must be one global batch, as for `make_microbatch_iterator_with_dynamic_shapes`.
        """
        ranges, _ = self._planned("make_microbatch_iterator_for_packable_sequences")
        return map(_sliced, sharding.views(self.data, ranges))

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Return the number of packs, and the tokens of the largest."""
        ranges, lengths = self._planned("get_microbatch_iterator_for_packable_sequences_len")
        return len(ranges), max(lengths, default=0)

    def to(self, device: str | torch.device) -> Self:
        """Move all tensors to `device`, in place; return `self`."""
        wanted = batch_rows.as_device(device)
        for key, value in self.data.items():
            if isinstance(value, (torch.Tensor, PackedTensor)):
                with batch_rows.device_errors(key, wanted):
                    self.data[key] = value.to(wanted)
        return self

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """Return a copy of the rows at `indices`, in that order; negative indices and bool masks are supported."""
        size = batch_rows.count_rows(self.data)
        picked = batch_rows.as_row_indices(indices, size)
        return type(self)({key: batch_rows.pick_rows(value, picked) for key, value in self.data.items()})

    def get_dict(self) -> dict[Any, Any]:
        """Return the underlying dictionary, not a copy."""
        return self.data

    def get_multimodal_dict(
        self,
        as_tensors: bool = False,
        device: str | torch.device | None = None,
        pixel_dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """Return the PackedTensors, and `token_type_ids` and `mm_token_type_ids` if present; {} for text only.

        Moves them to `device` and casts floating-point PackedTensors to `pixel_dtype`, if given. With `as_tensors`,
        PackedTensors become tensors (`PackedTensor.as_tensor`), and those without any media are omitted.
        """
        wanted = None if device is None else batch_rows.as_device(device)
        found: dict[str, Any] = {}
        for key, value in self.data.items():
            with batch_rows.device_errors(key, wanted):
                if isinstance(value, PackedTensor) and (value.has_media or not as_tensors):
                    cast = value.to(dtype=pixel_dtype)
                    found[key] = cast.as_tensor(wanted) if as_tensors else cast.to(wanted)
                elif key in TOKEN_TYPES and isinstance(value, torch.Tensor):
                    found[key] = value.to(wanted)
        return found

    def __getstate__(self) -> dict[str, Any]:
        pickled: dict[int, Any] = {}  # a tensor under two keys is pickled once
        for value in self.data.values():
            if isinstance(value, torch.Tensor) and id(value) not in pickled:
                pickled[id(value)] = picklable(value)
        return self.__dict__ | {"data": {key: pickled.get(id(value), value) for key, value in self.data.items()}}

    def _planned(self, caller: str) -> tuple[list[list[int]], list[int]]:
        size = batch_rows.count_rows(self.data)
        return sharding.planned_microbatches(self.micro_batch_indices, self.micro_batch_lengths, size, caller)

    def _copy_blocks(self, blocks: list[tuple[int, int]]) -> SlicedDataDict[DictT]:
        return _sliced({key: batch_rows.join_blocks(value, blocks) for key, value in self.data.items()})


class SlicedDataDict(BatchedDataDict[DictT]):
    """A batch taken from another one by slicing or sharding; only a marker type."""


def _sliced(data: dict[str, Any]) -> SlicedDataDict[Any]:
    """Wrap `data` itself, without setting its keys one by one."""
    batch: SlicedDataDict[Any] = SlicedDataDict()
    batch.data = data
    return batch
