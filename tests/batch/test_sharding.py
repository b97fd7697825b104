"""Shards of dynamic and packed microbatches: small cases worked out by hand, and errors."""

from __future__ import annotations

import pytest
import torch

from rlframework.base.errors import BatchError, BatchKeyError, BatchTypeError
from rlframework.batch.batched_data_dict import BatchedDataDict, SlicedDataDict
from rlframework.batch.packed_tensor import PackedTensor


def batch_of(lengths, width):
    """Tokens `100 * row + column`, and values of other kinds that identify their row."""
    rows = torch.arange(len(lengths))
    return BatchedDataDict(
        input_ids=rows[:, None] * 100 + torch.arange(width),
        input_lengths=torch.tensor(lengths, dtype=torch.int64),
        scores=rows[:, None].float().expand(-1, 3).clone(),
        hidden=rows[:, None, None].expand(-1, width, 2).to(torch.bfloat16),
        row=[int(row) for row in rows],
        media=PackedTensor([torch.full((int(row), 2), int(row)) if row % 2 else None for row in rows], 0),
    )


def dynamic(tokens, multiple=1, **more):
    return {
        "max_tokens_per_microbatch": tokens,
        "sequence_length_round": multiple,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        **more,
    }


def packing(tokens, algorithm="first_fit_decreasing", multiple=1, **more):
    return {
        "max_tokens_per_microbatch": tokens,
        "algorithm": algorithm,
        "sequence_length_pad_multiple": multiple,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        **more,
    }


# --- dynamic batches

LENGTHS = [3, 9, 5, 16, 2, 7, 11, 4]
# two shards, global batches of 4, at most 16 tokens, lengths rounded up to 4:
# rows 0..3 by length: 0 (3), 2 (5), 1 (9), 3 (16): shards get 0, 1 and 2, 3; the longest of each step 5 -> 8, 16 -> 16
# rows 4..7 by length: 4 (2), 7 (4), 5 (7), 6 (11): shards get 4, 5 and 7, 6; the longest of each step 4 -> 4, 11 -> 12


def dealt():
    return batch_of(LENGTHS, 16).shard_by_batch_size(2, batch_size=4, dynamic_batching_args=dynamic(16, 4))


def test_dynamic_shards():
    shards, indices = dealt()
    assert [shard["row"] for shard in shards] == [[0, 1, 4, 5], [2, 3, 7, 6]]
    assert indices == [0, 1, 4, 5, 2, 3, 7, 6]  # shard after shard
    for shard in shards:
        assert type(shard) is SlicedDataDict
        assert shard.micro_batch_indices == [[[0, 1], [1, 2]], [[0, 1], [1, 2]]]
        assert shard.micro_batch_lengths == [[8, 16], [4, 12]]
        assert shard.elem_counts_per_gb == [2, 2]
    assert shards[0].micro_batch_indices is not shards[1].micro_batch_indices


def test_dynamic_microbatches_are_truncated_where_dimension_1_is_the_sequence():
    shards, _ = dealt()
    part = shards[1].get_batch(1)
    assert type(part) is SlicedDataDict
    assert part.get_microbatch_iterator_dynamic_shapes_len() == 2
    first, second = part.make_microbatch_iterator_with_dynamic_shapes()
    assert type(first) is SlicedDataDict
    assert first["input_ids"].tolist() == [[700, 701, 702, 703]]
    assert second["input_ids"].tolist() == [[600 + column for column in range(12)]]
    assert second["hidden"].shape == (1, 12, 2)
    assert second["scores"].tolist() == [[6, 6, 6]]
    assert second["input_lengths"].tolist() == [11]
    assert (first["row"], second["row"]) == ([7], [6])
    assert first["media"].as_tensor().tolist() == [[7, 7]] * 7
    assert second["media"].as_tensor() is None
    assert second["input_ids"].untyped_storage().data_ptr() == shards[1]["input_ids"].untyped_storage().data_ptr()


def test_several_rows_in_a_dynamic_microbatch():
    # sorted 1, 2, 2, 6, 7; at most 12 tokens: three rows of 2 (6 tokens); 4 x 6 would be 24; two of 7 would be 14
    (shard,), indices = batch_of([7, 2, 1, 6, 2], 8).shard_by_batch_size(1, dynamic_batching_args=dynamic(12))
    assert indices == [2, 1, 4, 3, 0]
    assert shard.micro_batch_indices == [[[0, 3], [3, 4], [4, 5]]]
    assert shard.micro_batch_lengths == [[2, 6, 7]]


@pytest.mark.parametrize("algorithm", ["round_robin", "balanced"])
def test_rounding_up_stops_at_the_width(algorithm):
    args = dynamic(14, 64, algorithm=algorithm)
    (shard,), _ = batch_of([5, 6], 7).shard_by_batch_size(1, dynamic_batching_args=args)
    assert shard.micro_batch_lengths == [[7]]
    (part,) = shard.make_microbatch_iterator_with_dynamic_shapes()
    assert part["input_ids"].shape == (2, 7)


def test_the_width_is_taken_from_the_planned_key():
    batch = BatchedDataDict(
        tokens=torch.zeros(2, 6, dtype=torch.int64), n=torch.tensor([2, 2]), input_ids=torch.zeros(2, 9)
    )
    args = dynamic(12) | {"input_key": "tokens", "input_lengths_key": "n"}
    (shard,), _ = batch.shard_by_batch_size(1, dynamic_batching_args=args)
    (part,) = shard.get_batch(0).make_microbatch_iterator_with_dynamic_shapes()
    assert part["tokens"].shape == (2, 2)
    assert part["input_ids"].shape == (2, 9)


def test_metadata_set_by_the_caller_truncates_tensors_as_wide_as_input_ids_or_as_the_widest():
    batch = batch_of([2, 3], 5)
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 2]]], [[3]]
    (part,) = batch.make_microbatch_iterator_with_dynamic_shapes()
    assert (part["input_ids"].shape, part["scores"].shape) == ((2, 3), (2, 3))
    del batch["input_ids"]
    batch.micro_batch_lengths = [[4]]
    (part,) = batch.make_microbatch_iterator_with_dynamic_shapes()
    assert (part["hidden"].shape, part["scores"].shape) == ((2, 4, 2), (2, 3))


def test_another_sequence_dimension():
    batch = BatchedDataDict(input_ids=torch.arange(24).reshape(2, 3, 4), other=torch.zeros(2, 3, 2))
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 1], [1, 2]]], [[2, 1]]
    parts = list(batch.make_microbatch_iterator_with_dynamic_shapes(sequence_dim=2))
    assert parts[0]["input_ids"].tolist() == [[[0, 1], [4, 5], [8, 9]]]
    assert parts[1]["input_ids"].tolist() == [[[12], [16], [20]]]
    assert parts[1]["other"].shape == (1, 3, 2)


def test_microbatches_of_rows_without_tokens_still_have_a_column():
    shards, _ = batch_of([0, 0], 4).shard_by_batch_size(2, dynamic_batching_args=dynamic(8, 2, algorithm="balanced"))
    for shard in shards:
        assert shard.micro_batch_lengths == [[2]]
        (part,) = shard.make_microbatch_iterator_with_dynamic_shapes()
        assert part["input_ids"].shape == (1, 2)


# --- packing

# first fit, longest first, of 6 5 4 3 2 1 (rows 4 0 2 1 3 5) into 8: [6 2] [5 3] [4 1], one for each of three shards


def test_packed_shards():
    shards, indices = batch_of([5, 3, 4, 2, 6, 1], 6).shard_by_batch_size(3, sequence_packing_args=packing(8))
    assert [shard["row"] for shard in shards] == [[4, 3], [0, 1], [2, 5]]
    assert indices == [4, 3, 0, 1, 2, 5]
    assert [shard.micro_batch_indices for shard in shards] == [[[[0, 2]]]] * 3
    assert [shard.micro_batch_lengths for shard in shards] == [[[8]], [[8]], [[5]]]
    assert [shard.elem_counts_per_gb for shard in shards] == [[2], [2], [2]]
    (part,) = shards[2].make_microbatch_iterator_for_packable_sequences()
    assert part["input_ids"].shape == (2, 6)  # not truncated
    assert part["row"] == [2, 5]
    assert shards[2].get_microbatch_iterator_for_packable_sequences_len() == (1, 5)


def test_the_rows_of_a_pack_count_as_rounded_up():
    # 5 2 -> 6 2 (of 3): 6 + 3 = 9; 4 and 1 -> 6 and 3
    (shard,), _ = batch_of([5, 2, 4, 1], 6).shard_by_batch_size(1, sequence_packing_args=packing(9, multiple=3))
    assert sorted(shard.micro_batch_lengths[0]) == [9, 9]
    batch_of([7], 8).shard_by_batch_size(1, sequence_packing_args=packing(8))
    with pytest.raises(BatchError, match="row 0 has 7 tokens, rounded up 9, but max_tokens_per_microbatch is 8"):
        batch_of([7], 8).shard_by_batch_size(1, sequence_packing_args=packing(8, multiple=3))


def test_packed_shards_have_their_own_number_of_rows_in_each_global_batch():
    # of each three rows, cap 4: 4 | 1 1 and so on; two shards
    lengths = [4, 1, 1, 1, 4, 2]
    shards, indices = batch_of(lengths, 4).shard_by_batch_size(2, batch_size=3, sequence_packing_args=packing(4))
    assert sorted(indices) == list(range(6))
    for k, rows in enumerate(({0, 1, 2}, {3, 4, 5})):
        parts = [shard.get_batch(k) for shard in shards]
        assert {row for part in parts for row in part["row"]} == rows
        assert sorted(part.size for part in parts) == [1, 2]
        assert [part.elem_counts_per_gb for part in parts] == [[part.size] for part in parts]
        assert sorted(sum(part.micro_batch_lengths[0]) for part in parts) == [2 + k, 4]
    with pytest.raises(BatchError, match=r"get_batch\(2\): there are 2 global batches"):
        shards[0].get_batch(2)
    assert shards[0].get_batch(1, batch_size=77)["row"] == shards[0].get_batch(1)["row"]  # batch_size is ignored


def test_microbatch_order():
    lengths = [1, 1, 4, 2, 3]  # in order into 4: [1 1] [4] [2] [3]
    rows = {}
    for order in ("packer", "largest_first"):
        args = packing(4, "concatenative", microbatch_order=order)
        (shard,), _ = batch_of(lengths, 4).shard_by_batch_size(1, sequence_packing_args=args)
        rows[order] = (shard.micro_batch_lengths, [part["row"] for part in _packs(shard)])
    assert rows["packer"] == ([[2, 4, 2, 3]], [[0, 1], [2], [3], [4]])
    assert rows["largest_first"] == ([[4, 3, 2, 2]], [[2], [4], [0, 1], [3]])


def _packs(shard):
    return list(shard.make_microbatch_iterator_for_packable_sequences())


# --- edges


@pytest.mark.parametrize("args", [{"dynamic_batching_args": dynamic(8)}, {"sequence_packing_args": packing(8)}])
def test_an_empty_batch(args):
    shards, indices = batch_of([], 4).shard_by_batch_size(2, **args)
    assert indices == []
    for shard in shards:
        assert shard["input_ids"].shape == (0, 4)
        assert (shard.micro_batch_indices, shard.micro_batch_lengths, shard.elem_counts_per_gb) == ([[]], [[]], [0])
        assert list(shard.get_batch(0).make_microbatch_iterator_with_dynamic_shapes()) == []
        assert shard.get_microbatch_iterator_for_packable_sequences_len() == (0, 0)
    shards, _ = batch_of([], 4).shard_by_batch_size(2, batch_size=4, **args)
    assert shards[0].micro_batch_indices == []
    with pytest.raises(BatchError, match="there are 0 global batches"):
        shards[0].get_batch(0)


def test_plain_shards_carry_no_metadata():
    shard = batch_of([1, 1], 4).shard_by_batch_size(2)[0]
    assert shard.micro_batch_indices is shard.micro_batch_lengths is shard.elem_counts_per_gb is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_lengths_of_any_integer_dtype(dtype):
    batch = batch_of([2, 1], 4)
    batch["input_lengths"] = batch["input_lengths"].to(dtype)
    (shard,), _ = batch.shard_by_batch_size(1, dynamic_batching_args=dynamic(8))
    assert shard["row"] == [1, 0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"max_tokens_per_microbatch": 0}, BatchError, "max_tokens_per_microbatch must be at least 1, got 0"),
        ({"max_tokens_per_microbatch": 2.5}, BatchError, "max_tokens_per_microbatch must be an integer, got 2.5"),
        ({"sequence_length_round": None}, BatchError, "sequence_length_round must be an integer, got None"),
        ({"max_tokens": 8}, BatchKeyError, r"unknown keys \['max_tokens'\]"),
        ({"algorithm": "best"}, BatchError, "'best'; use round_robin or balanced"),
        ({"input_key": "ids"}, BatchKeyError, "the batch has no 'ids'"),
        ({"input_key": ["ids"]}, BatchTypeError, "input_key must be a string"),
        ({"input_key": "input_lengths"}, BatchTypeError, r"'input_lengths' must be a tensor \[B, S\]"),
        ({"input_lengths_key": "row"}, BatchTypeError, "row must be a 1-D tensor of integers, got a list"),
        ({"input_lengths_key": "scores"}, BatchTypeError, r"got torch.float32 of shape \[4, 3\]"),
        (
            {"max_tokens_per_microbatch": 3},
            BatchError,
            "row 1 has 4 tokens, rounded up 4, but max_tokens_per_mic.* is 3",
        ),
    ],
)
def test_bad_dynamic_arguments(change, error, message):
    with pytest.raises(error, match=message):
        batch_of([1, 4, 2, 3], 4).shard_by_batch_size(1, dynamic_batching_args=dynamic(8) | change)


def test_missing_and_wrong_arguments():
    batch = batch_of([1, 4], 4)
    with pytest.raises(BatchKeyError, match=r"dynamic_batching_args lacks \['input_lengths_key', 'max_tokens"):
        batch.shard_by_batch_size(1, dynamic_batching_args={"input_key": "input_ids", "sequence_length_round": 1})
    with pytest.raises(BatchTypeError, match="sequence_packing_args must be a dictionary"):
        batch.shard_by_batch_size(1, sequence_packing_args=3)
    with pytest.raises(ValueError, match=r"microbatch_order .* 'random'; use packer or largest_first"):
        batch.shard_by_batch_size(1, sequence_packing_args=packing(8, microbatch_order="random"))
    with pytest.raises(BatchError, match="unknown packing algorithm 'nonsense'"):
        batch.shard_by_batch_size(1, sequence_packing_args=packing(8, "nonsense"))
    with pytest.raises(AssertionError, match="cannot be passed together"):
        batch.shard_by_batch_size(1, dynamic_batching_args=dynamic(8), sequence_packing_args=packing(8))


@pytest.mark.parametrize("lengths", [[1, 5], [-1, 2]])
@pytest.mark.parametrize("args", [{"dynamic_batching_args": dynamic(64)}, {"sequence_packing_args": packing(64)}])
def test_lengths_out_of_range(lengths, args):
    row = 1 if lengths[1] == 5 else 0
    message = rf"input_lengths of row {row} is {lengths[row]}; allowed is 0\.\.4, the columns of input_ids"
    with pytest.raises(BatchError, match=message):
        batch_of(lengths, 4).shard_by_batch_size(1, **args)


@pytest.mark.parametrize("lengths", [torch.ones(2), torch.ones(2, dtype=torch.bool), torch.ones(2, 1), [1, 1]])
def test_lengths_of_another_type(lengths):
    batch = batch_of([1, 1], 4)
    batch["input_lengths"] = lengths
    with pytest.raises(BatchTypeError, match="input_lengths must be a 1-D tensor of integers"):
        batch.shard_by_batch_size(1, dynamic_batching_args=dynamic(8))


def test_rows_that_do_not_divide():
    batch = batch_of([1, 2, 3], 4)
    with pytest.raises(BatchError, match=r"Batch size \(3\) is not a multiple of shards \(2\).*balanced"):
        batch.shard_by_batch_size(2, dynamic_batching_args=dynamic(8))
    with pytest.raises(BatchError, match=r"Total batch size \(3\) is not a multiple of batch_size \(2\)"):
        batch.shard_by_batch_size(2, batch_size=2, sequence_packing_args=packing(8))
    with pytest.raises(BatchError, match="batch_size must be None if allow_uneven_shards is True"):
        batch.shard_by_batch_size(
            1, batch_size=3, allow_uneven_shards=True, dynamic_batching_args=dynamic(8, algorithm="balanced")
        )
    with pytest.raises(BatchError, match="Cannot create 4 bins with only 3 sequences"):
        batch.shard_by_batch_size(4, sequence_packing_args=packing(8))


# --- iterators without metadata

ITERATORS = (
    "make_microbatch_iterator_with_dynamic_shapes",
    "get_microbatch_iterator_dynamic_shapes_len",
    "make_microbatch_iterator_for_packable_sequences",
    "get_microbatch_iterator_for_packable_sequences_len",
)


@pytest.mark.parametrize("name", ITERATORS)
def test_iterators_without_metadata_raise_at_once(name):
    shards, _ = dealt()
    for batch in (batch_of([1], 4), shards[0].slice(0, 2), shards[0].select_indices([0]), shards[0].chunk(0, 1)):
        with pytest.raises(
            BatchError, match=rf"{name}: this batch has no microbatch metadata.*get_batch\(k\).*shard_by_batch_size"
        ):
            getattr(batch, name)()
    with pytest.raises(AssertionError, match=rf"{name} needs one global batch.*of 2.*get_batch\(k\)"):
        getattr(shards[0], name)()


@pytest.mark.parametrize("name", ITERATORS)
@pytest.mark.parametrize("change", ["rows", "ranges", "lengths"])
def test_metadata_that_no_longer_fit(name, change):
    part = dealt()[0][0].get_batch(0)
    if change == "rows":
        part.data = dict(part.slice(0, 1))
    elif change == "ranges":
        part.micro_batch_indices = [[[0, 2], [1, 2]]]
    else:
        part.micro_batch_lengths = [[8]]
    with pytest.raises(BatchError, match="do not fit the batch of"):
        getattr(part, name)()


def test_a_batch_truncated_after_planning():
    part = dealt()[0][0].get_batch(0)
    part.truncate_tensors(1, 3)
    with pytest.raises(BatchError, match="up to 16 wide at dimension 1, where the sequences are 3"):
        part.make_microbatch_iterator_with_dynamic_shapes()
    with pytest.raises(BatchError, match="dimension 0"):
        part.make_microbatch_iterator_with_dynamic_shapes(sequence_dim=0)


def test_get_batch_beyond_the_metadata():
    batch = batch_of([1, 1, 1, 1], 4)
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 2]]], [[1]]
    assert batch.get_batch(0, 2).micro_batch_lengths == [[1]]
    with pytest.raises(BatchError, match=r"get_batch\(1\): the batch has microbatch indices for 1 and lengths for 1"):
        batch.get_batch(1, 2)
