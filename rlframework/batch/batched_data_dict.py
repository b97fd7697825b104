"""`BatchedDataDict`: a dictionary of values that have one row for each sample, and what is done with batches of them.

Names and arguments follow NeMo-RL. What is done to one value is in `batch_rows`, who gets which rows in `sharding`.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

import torch

from rlframework.batch import batch_rows, microbatch_views, sharding
from rlframework.batch.batch_rows import integer
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.batch.sharding import DynamicBatchingArgs as DynamicBatchingArgs
from rlframework.batch.sharding import SequencePackingArgs as SequencePackingArgs
from rlframework.batch.tensor_parcel import parcel
from rlframework.errors import BatchError, BatchTypeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DictT = TypeVar("DictT", bound=Mapping[str, Any])
"""Names the keys for a type checker: `BatchedDataDict[MyTypedDict]`. Nothing is checked at run time."""

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


class BatchedDataDict(UserDict[str, Any], Generic[DictT]):
    """Tensors with the batch on dimension 0, lists with one element a row, and `PackedTensor`s, by name.

    Nothing is checked when a value is set; the methods that need rows of one count check it, and raise `BatchError`.
    Elements of lists and rows of PackedTensors are passed on, not copied, but for lists in `repeat_interleave`.

    The metadata of microbatches survive pickling and `get_batch`; every other method that returns a new batch drops
    them, and an iterator that needs them says so. A batch goes to another process without gradients, as
    `rlframework.batch.tensor_parcel` describes.
    """

    micro_batch_indices: list[list[list[int]]] | None = None
    """For each global batch, rows `[start, end]` of each microbatch, counted from the first of that global batch."""
    micro_batch_lengths: list[list[int]] | None = None
    """For each global batch, the padded length of each dynamic microbatch, or the tokens of each pack."""
    elem_counts_per_gb: list[int] | None = None
    """Rows here of each global batch."""
    micro_batch_input_key: str | None = None
    """The key of the `[B, S]` tokens that the microbatches were planned for."""

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[Any, Any]],
        pad_value_dict: Mapping[str, float] | None = None,
        *,
        allow_missing_packed_tensors: bool = False,
    ) -> Self:
        """The rows of all batches in order, under the union of their keys, sorted.

        Lists, PackedTensors and 1-D tensors are joined. Tensors of more dimensions are padded on the right of dimension
        1 to the longest, with `pad_value_dict[key]` or 0. A batch without rows may lack keys; any other that lacks one
        is a `BatchKeyError` (a `KeyError`) naming key and batch, but with `allow_missing_packed_tensors` a PackedTensor
        that is missing counts as rows without media. No batches: an empty dictionary.
        """
        if isinstance(batches, Mapping) or not all(isinstance(batch, Mapping) for batch in batches):
            raise BatchTypeError("from_batches takes a list of batches (dictionaries)")
        sizes = [batch_rows.count_rows(batch, f"batch {position}") for position, batch in enumerate(batches)]
        joined = cls()
        for key in sorted({key for batch in batches for key in batch}, key=str):
            known = batch_rows.values_of(key, batches, sizes, fill_packed=allow_missing_packed_tensors)
            joined.data[key] = batch_rows.concatenate(key, known, (pad_value_dict or {}).get(key, 0))
        return joined

    @property
    def size(self) -> int:
        """Rows of the first key; 0 without keys."""
        for key, value in self.data.items():
            return len(batch_rows.as_rows(key, value))
        return 0

    def all_gather(self, group: ProcessGroup | None = None) -> Self:
        """The rows of all ranks of `group` in rank order, the same on every rank; ranks may hold any number of rows."""
        from rlframework.batch.collectives import all_gather_batch

        return type(self)(all_gather_batch(self.data, group))

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict[DictT]:
        """A copy of the `rank`-th of `chunks` equal, contiguous parts."""
        size = batch_rows.count_rows(self.data)
        rank, chunks = integer("rank", rank), integer("chunks", chunks)
        if chunks < 1 or not 0 <= rank < chunks:
            raise BatchError(f"chunk {rank} of {chunks}: `chunks` must be at least 1 and `rank` in 0..{chunks - 1}")
        if size % chunks:
            raise BatchError(f"batch of {size} rows is not a multiple of {chunks} chunks")
        length = size // chunks
        return self._copy_blocks([(rank * length, (rank + 1) * length)])

    def reorder_data(self, reorded_indices: Sequence[int] | torch.Tensor) -> None:
        """Sort the rows in place: the row now at position p has the sort key `reorded_indices[p]`.

        With the indices that `shard_by_batch_size` returned this puts the joined outputs of the shards back into the
        order of the input. Equal keys keep their order. Metadata of microbatches is left as it is.
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
        """Split every `batch_size` consecutive rows (none: all) evenly over `shards`; shard i keeps its parts in order.

        So the k-th part of each shard belongs to the k-th global batch. Eight rows, two shards, `batch_size` 4: rows
        0, 1, 4, 5 and 2, 3, 6, 7. `allow_uneven_shards` (without `batch_size`) makes shards of `ceil(rows / shards)`
        rows; the last may have fewer or none. Tensors are copies, each byte copied once.

        With `dynamic_batching_args` or `sequence_packing_args` the rows of each global batch are dealt by length, into
        as many microbatches on every shard, none over `max_tokens_per_microbatch`; but for round-robin dynamic batches
        they need not divide by the shards. The shards then carry metadata:
        `shard.get_batch(k)` and an iterator go through the microbatches of global batch k. Returned are `(shards,
        indices)`: `indices[p]` is the row that is at position p of the joined shards (all of shard 0, then of shard 1,
        ...), so `reorder_data(indices)` on joined outputs restores the order of the input.
        """
        size = batch_rows.count_rows(self.data)
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise BatchError("dynamic_batching_args and sequence_packing_args cannot be passed together; take one")
        shards = integer("shards", shards)
        batch_size = None if batch_size is None else integer("batch_size", batch_size)
        planned = (self.data, size, shards, batch_size, allow_uneven_shards)
        if dynamic_batching_args is not None:
            plans = sharding.plan_dynamic(*planned, dynamic_batching_args)
            return self._carry_out(plans, dynamic_batching_args["input_key"]), sharding.joined_rows(plans)
        if sequence_packing_args is not None:
            plans = sharding.plan_packed(*planned, sequence_packing_args)
            return self._carry_out(plans, sequence_packing_args["input_key"]), sharding.joined_rows(plans)
        return [self._copy_blocks(blocks) for blocks in sharding.plain_blocks(*planned[1:])]

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict[DictT]:
        """Rows `[batch_idx * batch_size, (batch_idx + 1) * batch_size)`, as views, with their microbatch metadata.

        With `elem_counts_per_gb`, which dynamic and packed shards have, that many rows instead, and `batch_size` is
        ignored.
        """
        counts, batch_idx = self.elem_counts_per_gb, integer("batch_idx", batch_idx)
        if counts is not None:
            if not 0 <= batch_idx < len(counts):
                raise BatchError(f"get_batch({batch_idx}): there are {len(counts)} global batches, counted from 0")
            start = sum(counts[:batch_idx])
            batch = self.slice(start, start + counts[batch_idx])
            batch.elem_counts_per_gb = [counts[batch_idx]]
        else:
            if batch_size is None or (batch_size := integer("batch_size", batch_size)) < 1 or batch_idx < 0:
                raise BatchError(
                    f"get_batch({batch_idx}, {batch_size}): `batch_idx` must be at least 0 and `batch_size` at least 1"
                )
            batch = self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)
        if self.micro_batch_indices is not None and self.micro_batch_lengths is not None:
            if not batch_idx < len(self.micro_batch_indices) == len(self.micro_batch_lengths):
                raise BatchError(
                    f"get_batch({batch_idx}): there are microbatch indices of {len(self.micro_batch_indices)} and "
                    f"lengths of {len(self.micro_batch_lengths)} global batches"
                )
            batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
            batch.micro_batch_input_key = self.micro_batch_input_key
        return batch

    def slice(self, start: int, end: int) -> SlicedDataDict[DictT]:
        """Rows `[start, end)`: tensors are views, lists are new lists."""
        size = batch_rows.count_rows(self.data)
        start, end = integer("start", start), integer("end", end)
        if not 0 <= start <= end <= size:
            raise BatchError(f"slice({start}, {end}) of a batch of {size} rows: 0 <= start <= end <= {size} must hold")
        return _part({key: value[start:end] for key, value in self.data.items()})

    def repeat_interleave(self, num_repeats: int, *, share_immutable_media: bool = False) -> Self:
        """Each row `num_repeats` times, one after the other; elements of lists are independent (deep) copies.

        PackedTensors are refused (`BatchTypeError`, a `NotImplementedError`) unless `share_immutable_media`: then the
        repeats of a row share its media, also media inside the elements of lists.
        """
        batch_rows.count_rows(self.data)
        num_repeats = integer("num_repeats", num_repeats)
        if not 0 <= num_repeats < 1 << 31:
            raise BatchError(f"repeat_interleave({num_repeats}): the number of repeats must be in 0..2**31 - 1")
        return type(self)(
            {
                key: batch_rows.repeat_rows(key, value, num_repeats, share_media=share_immutable_media)
                for key, value in self.data.items()
            }
        )

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cut every tensor that has dimension `dim` to its first `truncated_len` there, in place, as views."""
        dim, truncated_len = integer("dim", dim), integer("truncated_len", truncated_len)
        if dim < 0 or truncated_len < 0:
            raise BatchError(f"truncate_tensors(dim={dim}, truncated_len={truncated_len}): both must be at least 0")
        tensors = {k: v for k, v in self.data.items() if isinstance(v, torch.Tensor) and v.ndim > dim}
        short = {key: tuple(tensor.shape) for key, tensor in tensors.items() if tensor.shape[dim] < truncated_len}
        if short:
            raise BatchError(
                f"truncate_tensors(dim={dim}, truncated_len={truncated_len}): these are shorter there: {short}"
            )
        for key, tensor in tensors.items():
            self.data[key] = tensor.narrow(dim, 0, truncated_len)

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict[DictT]]:
        """Views of `microbatch_size` rows in order; the number of rows must be a multiple of it."""
        size = batch_rows.count_rows(self.data)
        microbatch_size = integer("microbatch_size", microbatch_size)
        if microbatch_size < 1 or size % microbatch_size:
            raise BatchError(
                f"batch of {size} rows is not a multiple of the microbatch size {microbatch_size} (at least 1)"
            )
        ranges = ((start, start + microbatch_size) for start in range(0, size, microbatch_size))
        return microbatch_views.views(self.data, ranges, _part)

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[SlicedDataDict[DictT]]:
        """The microbatches that `shard_by_batch_size(dynamic_batching_args=...)` planned, cut to their lengths; views.

        The batch is one global batch: what `get_batch` returned, or a shard that has only one. Cut at `sequence_dim`
        are the tensors that are as wide there as the planned input; others, such as `[B, 3]`, are left alone.
        """
        ranges, lengths = microbatch_views.planned(self, "make_microbatch_iterator_with_dynamic_shapes")
        return microbatch_views.truncated_views(self, ranges, lengths, integer("sequence_dim", sequence_dim), _part)

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """How many microbatches `make_microbatch_iterator_with_dynamic_shapes` gives."""
        return len(microbatch_views.planned(self, "get_microbatch_iterator_dynamic_shapes_len")[0])

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict[DictT]]:
        """The rows of each pack that `shard_by_batch_size(sequence_packing_args=...)` planned, not yet joined; views.

        The batch is one global batch, as for `make_microbatch_iterator_with_dynamic_shapes`.
        """
        ranges, _ = microbatch_views.planned(self, "make_microbatch_iterator_for_packable_sequences")
        return microbatch_views.views(self.data, ranges, _part)

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """How many packs there are, and the tokens of the largest."""
        ranges, lengths = microbatch_views.planned(self, "get_microbatch_iterator_for_packable_sequences_len")
        return len(ranges), max(lengths, default=0)

    def to(self, device: str | torch.device) -> Self:
        """Move all tensors to `device`, in place; returns itself."""
        wanted = batch_rows.as_device(device)
        for key, value in self.data.items():
            if isinstance(value, (torch.Tensor, PackedTensor)):
                with batch_rows.moving(key, wanted):
                    self.data[key] = value.to(wanted)
        return self

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """A copy of the rows at `indices` in their order; negative ones count from the end; a bool mask works too."""
        size = batch_rows.count_rows(self.data)
        picked = batch_rows.as_row_numbers(indices, size)
        return type(self)({key: batch_rows.pick_rows(value, picked) for key, value in self.data.items()})

    def get_dict(self) -> dict[Any, Any]:
        """The dictionary inside, not a copy."""
        return self.data

    def get_multimodal_dict(
        self,
        as_tensors: bool = False,
        device: str | torch.device | None = None,
        pixel_dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """The PackedTensors, and `token_type_ids` and `mm_token_type_ids` where they are there; {} for text only.

        On `device` if one is given; floating PackedTensors as `pixel_dtype` if one is given. With `as_tensors`
        PackedTensors become tensors (`PackedTensor.as_tensor`), and those without any media are left out.
        """
        wanted = None if device is None else batch_rows.as_device(device)
        found: dict[str, Any] = {}
        for key, value in self.data.items():
            with batch_rows.moving(key, wanted):
                if isinstance(value, PackedTensor) and (value.has_media or not as_tensors):
                    cast = value.to(dtype=pixel_dtype)
                    found[key] = cast.as_tensor(wanted) if as_tensors else cast.to(wanted)
                elif key in _TOKEN_TYPES and isinstance(value, torch.Tensor):
                    found[key] = value.to(wanted)
        return found

    def __getstate__(self) -> dict[str, Any]:
        parcels: dict[int, Any] = {}  # a tensor under two keys travels once
        for value in self.data.values():
            if isinstance(value, torch.Tensor) and id(value) not in parcels:
                parcels[id(value)] = parcel(value)
        return self.__dict__ | {"data": {key: parcels.get(id(value), value) for key, value in self.data.items()}}

    def _copy_blocks(self, blocks: list[tuple[int, int]]) -> SlicedDataDict[DictT]:
        return _part({key: batch_rows.join_blocks(value, blocks) for key, value in self.data.items()})

    def _carry_out(self, plans: list[sharding.ShardPlan], input_key: str) -> list[SlicedDataDict[DictT]]:
        shards = []
        for plan in plans:
            rows = torch.tensor(plan.rows, dtype=torch.int64)
            shard = _part({key: batch_rows.pick_rows(value, rows) for key, value in self.data.items()})
            shard.micro_batch_indices = plan.micro_batch_indices
            shard.micro_batch_lengths = plan.micro_batch_lengths
            shard.elem_counts_per_gb = plan.elem_counts_per_gb
            shard.micro_batch_input_key = input_key
            shards.append(shard)
        return shards


class SlicedDataDict(BatchedDataDict[DictT]):
    """A batch that is a part of another one; only a marker."""


def _part(data: dict[str, Any]) -> SlicedDataDict[Any]:
    """A `SlicedDataDict` of `data` itself, without going through its keys one by one."""
    part: SlicedDataDict[Any] = SlicedDataDict()
    part.data = data
    return part
