"""`BatchedDataDict`: a dictionary of values that have one row for each sample, and what is done with batches of them.

Names and arguments follow NeMo-RL. Not here yet: dynamic batching and packing in `shard_by_batch_size`, the iterators
that belong to them, and multimodal values.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict, TypeVar

import torch

from rlframework.distributed import batch_rows
from rlframework.errors import BatchError, BatchKeyError, NotSupported

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DictT = TypeVar("DictT", bound=Mapping[str, Any])
"""Names the keys for a type checker: `BatchedDataDict[MyTypedDict]`. Nothing is checked at run time."""


class DynamicBatchingArgs(TypedDict):
    """How rows of like length become microbatches of at most `max_tokens_per_microbatch` tokens, padding included.

    The length of each microbatch is rounded up to a multiple of `sequence_length_round`; `input_key` names the
    `[B, S]` tokens, `input_lengths_key` the `[B]` tensor of their lengths.
    """

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: str
    input_lengths_key: str


class BatchedDataDict(UserDict[str, Any], Generic[DictT]):
    """Tensors with the batch on dimension 0, and lists with one element a row, by name.

    Nothing is checked when a value is set; the methods that need rows of one count check it, and raise `BatchError`.
    The metadata of microbatches (`micro_batch_indices`, `micro_batch_lengths`, `elem_counts_per_gb`) survives pickling
    and `get_batch`; every other method that returns a new batch drops it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batch_indices: list[list[list[int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[Any, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """The rows of all batches in order, under the union of their keys, sorted.

        Lists and 1-D tensors are joined. Tensors of more dimensions are padded on the right of dimension 1 to the
        longest, with `pad_value_dict[key]` or 0. A batch without rows may lack keys; any other that lacks one is a
        `BatchKeyError` (a `KeyError`) naming key and batch. No batches: an empty dictionary.
        """
        sizes = [batch_rows.count_rows(batch, f"batch {position}") for position, batch in enumerate(batches)]
        joined = cls()
        for key in sorted({key for batch in batches for key in batch}, key=str):
            missing = [position for position, batch in enumerate(batches) if sizes[position] and key not in batch]
            if missing:
                raise BatchKeyError(
                    f"key {key!r} is missing from batch {', '.join(map(str, missing))} of {len(batches)}; all batches "
                    "with rows must have the same keys: add it there, or delete it elsewhere"
                )
            values = [batch[key] for batch in batches if key in batch]
            joined[key] = batch_rows.concatenate(key, values, (pad_value_dict or {}).get(key, 0))
        return joined

    @property
    def size(self) -> int:
        """Rows of the first key; 0 without keys."""
        for key, value in self.data.items():
            return len(batch_rows.as_rows(key, value))
        return 0

    def all_gather(self, group: ProcessGroup | None = None) -> Self:
        """The rows of all ranks of `group` in rank order, the same on every rank; ranks may hold any number of rows."""
        from rlframework.distributed.collectives import all_gather_batch

        return type(self)(all_gather_batch(self.data, group))

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict[DictT]:
        """A copy of the `rank`-th of `chunks` equal, contiguous parts."""
        size = batch_rows.count_rows(self.data)
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
        keys = torch.as_tensor(reorded_indices)
        if keys.ndim != 1 or len(keys) != size:
            raise BatchError(f"reorder_data got indices of shape {list(keys.shape)} for a batch of {size} rows")
        order = torch.argsort(keys, stable=True)
        for key, value in self.data.items():
            self.data[key] = batch_rows.pick_rows(value, order)

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
    ) -> list[SlicedDataDict[DictT]]:
        """Split every `batch_size` consecutive rows (none: all) evenly over `shards`; shard i keeps its parts in order.

        So the k-th part of each shard belongs to the k-th global batch. Eight rows, two shards, `batch_size` 4: rows
        0, 1, 4, 5 and 2, 3, 6, 7. `allow_uneven_shards` (without `batch_size`) makes shards of `ceil(rows / shards)`
        rows; the last may have fewer or none. Tensors are copies, each byte copied once.

        `dynamic_batching_args` raises `NotSupported` for now.
        """
        if dynamic_batching_args is not None:
            raise NotSupported("shard_by_batch_size does not take `dynamic_batching_args` yet: leave it out")
        size = batch_rows.count_rows(self.data)
        _check_sharding(size, shards, batch_size, allow_uneven_shards)
        if allow_uneven_shards:
            length = -(-size // shards)
            return [
                self._copy_blocks([(min(shard * length, size), min((shard + 1) * length, size))])
                for shard in range(shards)
            ]
        starts = range(0, size, batch_size) if batch_size else [0]
        length = (batch_size or size) // shards
        return [
            self._copy_blocks([(start + shard * length, start + (shard + 1) * length) for start in starts])
            for shard in range(shards)
        ]

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict[DictT]:
        """Rows `[batch_idx * batch_size, (batch_idx + 1) * batch_size)`, as views, with their microbatch metadata.

        With `elem_counts_per_gb`, that many rows instead, and `batch_size` is ignored.
        """
        counts = self.elem_counts_per_gb
        if counts is not None:
            if not 0 <= batch_idx < len(counts):
                raise BatchError(f"get_batch({batch_idx}): there are global batches 0..{len(counts) - 1}")
            start = sum(counts[:batch_idx])
            batch = self.slice(start, start + counts[batch_idx])
            batch.elem_counts_per_gb = [counts[batch_idx]]
        else:
            if batch_size is None or batch_size < 1 or batch_idx < 0:
                raise BatchError(
                    f"get_batch({batch_idx}, {batch_size}): `batch_idx` must be at least 0 and `batch_size` at least 1"
                )
            batch = self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)
        if self.micro_batch_indices is not None and self.micro_batch_lengths is not None:
            batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
        return batch

    def slice(self, start: int, end: int) -> SlicedDataDict[DictT]:
        """Rows `[start, end)`: tensors are views, lists are new lists."""
        size = batch_rows.count_rows(self.data)
        if not 0 <= start <= end <= size:
            raise BatchError(f"slice({start}, {end}) of a batch of {size} rows: 0 <= start <= end <= {size} must hold")
        return SlicedDataDict({key: value[start:end] for key, value in self.data.items()})

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Each row `num_repeats` times, one after the other; elements of lists are independent (deep) copies."""
        batch_rows.count_rows(self.data)
        if num_repeats < 0:
            raise BatchError(f"repeat_interleave({num_repeats}): the number of repeats must be at least 0")
        return type(self)({key: batch_rows.repeat_rows(value, num_repeats) for key, value in self.data.items()})

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cut every tensor that has dimension `dim` to its first `truncated_len` there, in place, as views."""
        tensors = {k: v for k, v in self.data.items() if isinstance(v, torch.Tensor) and v.ndim > dim}
        short = {key: tuple(tensor.shape) for key, tensor in tensors.items() if tensor.shape[dim] < truncated_len}
        if dim < 0 or truncated_len < 0 or short:
            raise BatchError(
                f"truncate_tensors(dim={dim}, truncated_len={truncated_len}): both must be at least 0, and no tensor "
                f"may be shorter; shorter: {short or 'none'}"
            )
        for key, tensor in tensors.items():
            self.data[key] = tensor.narrow(dim, 0, truncated_len)

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict[DictT]]:
        """Slices of `microbatch_size` rows in order; the number of rows must be a multiple of it."""
        size = batch_rows.count_rows(self.data)
        if microbatch_size < 1 or size % microbatch_size:
            raise BatchError(
                f"batch of {size} rows is not a multiple of the microbatch size {microbatch_size} (at least 1)"
            )
        return (self.slice(start, start + microbatch_size) for start in range(0, size, microbatch_size))

    def to(self, device: str | torch.device) -> Self:
        """Move all tensors to `device`, in place; returns itself."""
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor):
                self.data[key] = value.to(device)
        return self

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """A copy of the rows at `indices` in their order; negative ones count from the end; a bool mask works too."""
        size = batch_rows.count_rows(self.data)
        picked = _normalise_indices(indices, size)
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
        """The multimodal values: none yet."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["data"] = {key: batch_rows.without_unused_storage(value) for key, value in self.data.items()}
        return state

    def _copy_blocks(self, blocks: list[tuple[int, int]]) -> SlicedDataDict[DictT]:
        return SlicedDataDict({key: batch_rows.join_blocks(value, blocks) for key, value in self.data.items()})


class SlicedDataDict(BatchedDataDict[DictT]):
    """A batch that is a part of another one; only a marker."""


def _check_sharding(size: int, shards: int, batch_size: int | None, allow_uneven_shards: bool) -> None:
    if shards < 1 or (batch_size is not None and batch_size < 1):
        raise BatchError(f"{shards} shards of batch size {batch_size}: both must be at least 1")
    if allow_uneven_shards:
        if batch_size is not None:
            raise BatchError(f"batch_size must be None if allow_uneven_shards is True, got {batch_size}")
        return
    if batch_size is not None and size % batch_size:
        raise BatchError(f"Total batch size ({size}) is not a multiple of batch_size ({batch_size})")
    per_batch = size if batch_size is None else batch_size
    if per_batch % shards:
        raise BatchError(
            f"Batch size ({per_batch}) is not a multiple of shards ({shards}): change one of them, or pass "
            "allow_uneven_shards=True"
        )


def _normalise_indices(indices: Sequence[int] | torch.Tensor, size: int) -> torch.Tensor:
    given = torch.as_tensor(indices, dtype=None if len(indices) else torch.int64)
    if given.dtype == torch.bool and given.shape == (size,):
        return given.nonzero().squeeze(1)
    if given.ndim != 1 or given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise BatchError(
            f"select_indices takes a list of integers or a mask of {size} bools, got {given.dtype} of shape "
            f"{list(given.shape)}"
        )
    wrong = given[(given < -size) | (given >= size)]
    if len(wrong):
        raise BatchError(f"row {int(wrong[0])} is not in the batch of {size} rows: indices are {-size}..{size - 1}")
    return torch.where(given < 0, given + size, given).to(torch.int64)
