"""Shards of all kinds over random batches: nothing lost, the order restored, every microbatch within its cap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlframework.base.errors import BatchError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor

ODD = 17  # the width of a tensor whose dimension 1 is not a sequence; wider than any sequence here
KNOWN = ["concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"]


def batch_of(lengths, width):
    rows = torch.arange(len(lengths))
    return BatchedDataDict(
        input_ids=rows[:, None] * 100 + torch.arange(width),
        input_lengths=torch.tensor(lengths, dtype=torch.int64),
        mask=(rows[:, None] + torch.arange(width)) % 2 == 0,
        hidden=(rows[:, None, None] * 2 + torch.arange(width)[:, None] + torch.arange(2)).to(torch.bfloat16),
        odd=rows[:, None].to(torch.float64).expand(-1, ODD).clone(),
        row=rows.clone(),
        text=[f"row {int(row)}" for row in rows],
        media=PackedTensor([torch.full((int(row) % 3, 2), int(row)) if row % 2 else None for row in rows], 0),
    )


def plain_values(value):
    """Convert to lists of Python numbers, for comparison."""
    if isinstance(value, PackedTensor):
        return [None if row is None else row.tolist() for row in value.tensors]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def assert_same(one, two):
    assert set(one) == set(two)
    for key, value in two.items():
        assert type(one[key]) is type(value)
        assert getattr(one[key], "dtype", None) == getattr(value, "dtype", None)
        assert plain_values(one[key]) == plain_values(value), key


@dataclass
class Trial:
    """A batch and the options for sharding it."""

    lengths: list[int]
    width: int
    shards: int
    per_batch: int | None
    kind: str
    algorithm: str
    multiple: int
    cap: int

    @property
    def args(self) -> dict[str, Any]:
        named = {"input_key": "input_ids", "input_lengths_key": "input_lengths", "algorithm": self.algorithm}
        named["max_tokens_per_microbatch"] = self.cap
        if self.kind == "dynamic":
            return {"dynamic_batching_args": named | {"sequence_length_round": self.multiple}}
        return {"sequence_packing_args": named | {"sequence_length_pad_multiple": self.multiple}}

    @property
    def chunks(self) -> list[range]:
        size = len(self.lengths)
        if self.per_batch is None:
            return [range(size)]
        return [range(start, start + self.per_batch) for start in range(0, size, self.per_batch)]


def rounded(length, multiple):
    return (length + multiple - 1) // multiple * multiple


@st.composite
def trials(draw):
    kind = draw(st.sampled_from(["dynamic", "packed"]))
    algorithm = draw(st.sampled_from([*KNOWN, "balanced"] if kind == "packed" else ["round_robin", "balanced"]))
    shards, width, multiple = draw(st.integers(1, 4)), draw(st.integers(1, 12)), draw(st.integers(1, 4))
    per_batch = draw(st.integers(1, 12))
    if kind == "dynamic" and algorithm == "round_robin":
        per_batch = -(-per_batch // shards) * shards
    chunks = draw(st.integers(0, 3))
    shortest = 1 if algorithm in KNOWN else 0
    size = per_batch * chunks
    lengths = draw(st.lists(st.integers(shortest, width), min_size=size, max_size=size))
    longest = rounded(max(lengths, default=1) or 1, multiple)
    cap = draw(st.integers(longest, 3 * longest))
    whole = chunks <= 1 and draw(st.booleans())
    return Trial(lengths, width, shards, None if whole else per_batch, kind, algorithm, multiple, cap)


def sharded(trial):
    """The shards and indices, or None where there are legitimately too few rows for a microbatch on every shard."""
    batch = batch_of(trial.lengths, trial.width)
    try:
        return batch.shard_by_batch_size(trial.shards, batch_size=trial.per_batch, **trial.args)
    except BatchError:
        assert any(len(chunk) % trial.shards for chunk in trial.chunks)
        return None


@pytest.mark.slow
@given(trials())
@settings(deadline=None, max_examples=100)
def test_shards_lose_nothing_and_respect_the_cap(trial):
    made = sharded(trial)
    if made is None:
        return
    shards, indices = made
    whole = batch_of(trial.lengths, trial.width)
    assert len(shards) == trial.shards
    assert [row for shard in shards for row in shard["row"].tolist()] == indices
    joined = BatchedDataDict.from_batches(shards)
    joined.reorder_data(indices)
    assert_same(joined, whole)
    for k, chunk in enumerate(trial.chunks):
        check_global_batch(trial, whole, chunk, [shard.get_batch(k) for shard in shards])
    with pytest.raises(BatchError, match="global batches"):
        shards[0].get_batch(len(trial.chunks))


def check_global_batch(trial, whole, chunk, parts):
    assert sorted(row for part in parts for row in part["row"].tolist()) == list(chunk)
    counts = set()
    for part in parts:
        microbatches = list(
            part.make_microbatch_iterator_with_dynamic_shapes()
            if trial.kind == "dynamic"
            else part.make_microbatch_iterator_for_packable_sequences()
        )
        counts.add(len(microbatches))
        assert [row for micro in microbatches for row in micro["row"].tolist()] == part["row"].tolist()
        for micro, length in zip(microbatches, part.micro_batch_lengths[0], strict=True):
            check_microbatch(trial, whole, micro, length)
    assert len(counts) == 1
    if trial.kind == "dynamic":
        assert {part.get_microbatch_iterator_dynamic_shapes_len() for part in parts} == counts
    else:
        lengths = [part.get_microbatch_iterator_for_packable_sequences_len() for part in parts]
        assert {count for count, _ in lengths} == counts
        assert [largest for _, largest in lengths] == [max(part.micro_batch_lengths[0], default=0) for part in parts]


def check_microbatch(trial, whole, micro, length):
    rows = micro["row"].tolist()
    assert rows
    tokens = [rounded(trial.lengths[row], trial.multiple) for row in rows]
    if trial.kind == "packed":
        assert sum(tokens) == length <= trial.cap
        width = trial.width
    else:
        own = min(rounded(max(trial.lengths[row] for row in rows) or 1, trial.multiple), trial.width)
        if trial.algorithm == "balanced":  # rows without tokens take no room: data processors leave them out
            assert length == own
            assert sum(trial.lengths[row] > 0 for row in rows) * length <= trial.cap
        else:  # as wide as this step is on the shard that has the longest row
            assert own <= length <= trial.width
            assert len(rows) * length <= trial.cap
        width = length
    expected = whole.select_indices(rows)
    for key in ("input_ids", "mask", "hidden"):
        expected[key] = expected[key][:, :width]
    assert_same(micro, expected)


# --- copied bytes


class Written(TorchDispatchMode):
    """Adds up the bytes that operations write into new memory."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = [*args, *(kwargs or {}).values()]
        flat = [item for value in inputs for item in (value if isinstance(value, (list, tuple)) else [value])]
        known = {item.untyped_storage().data_ptr() for item in flat if isinstance(item, torch.Tensor)}
        for made in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(made, torch.Tensor) and (
                made.untyped_storage().data_ptr() not in known or func.__name__[0] == "_"
            ):
                self.bytes += made.numel() * made.element_size()
        return out


def big_batch():
    batch = batch_of([200 + row % 7 for row in range(24)], 400)
    data = sum(v.numel() * v.element_size() for v in batch.values() if isinstance(v, torch.Tensor))
    return batch, data


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 8},
        {"batch_size": 24},
        {"allow_uneven_shards": True},
        Trial([], 0, 2, 8, "dynamic", "round_robin", 1, 1000).args | {"batch_size": 8},
        Trial([], 0, 2, 8, "dynamic", "balanced", 1, 1000).args | {"batch_size": 8},
        Trial([], 0, 2, 8, "packed", "first_fit_decreasing", 1, 1000).args,
        Trial([], 0, 2, 8, "packed", "balanced", 1, 1000).args,
    ],
)
def test_sharding_copies_each_byte_once(arguments):
    batch, size = big_batch()
    with Written() as written:
        made = batch.shard_by_batch_size(2, **arguments)
    shards = made[0] if isinstance(made, tuple) else made
    for shard in shards:
        for value in shard.values():
            if isinstance(value, torch.Tensor):  # of its own, and of its rows only
                assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
    assert size <= written.bytes <= size + 24 * 8 * 2  # and the rows' numbers, once or twice


def test_whole_batches_are_copied_once():
    batch, size = big_batch()
    order = torch.randperm(24)
    for work in (
        lambda: batch.chunk(0, 1),
        lambda: batch.select_indices(order),
        lambda: BatchedDataDict.from_batches([batch]),
        lambda: BatchedDataDict.from_batches([batch.slice(0, 5), batch.slice(5, 24)]),
        lambda: BatchedDataDict(batch).reorder_data(order),
    ):
        with Written() as written:
            work()
        assert size <= written.bytes <= size + 24 * 8 * 8  # and what is computed from the order


def test_views_copy_nothing():
    batch, _ = big_batch()
    shards, _ = batch.shard_by_batch_size(2, batch_size=8, **Trial([], 0, 2, 8, "dynamic", "round_robin", 1, 900).args)
    with Written() as written:
        batch.slice(3, 9)
        list(batch.make_microbatch_iterator(3))
        part = shards[0].get_batch(1)
        list(part.make_microbatch_iterator_with_dynamic_shapes())
        list(part.make_microbatch_iterator_for_packable_sequences())
        part.truncate_tensors(1, 9)
    assert written.bytes == 0
