from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from rlframework.errors import BatchError, BatchKeyError, BatchTypeError, NotSupported


def make_batch(rows, width=3):
    """A value of every kind, in which each row tells its number."""
    number = torch.arange(rows)
    return BatchedDataDict(
        one=number.clone(),
        two=number[:, None] * 10 + torch.arange(width),
        three=(number[:, None, None] + torch.zeros(width, 2)).to(torch.bfloat16),
        mask=number % 2 == 0,
        text=[f"row {row}" for row in range(rows)],
        objects=[{"row": row} for row in range(rows)],
    )


def numbers(batch):
    """The rows of `make_batch` that `batch` holds, after checking that all values agree on them."""
    rows = batch["one"].tolist()
    assert batch["text"] == [f"row {row}" for row in rows]
    assert batch["objects"] == [{"row": row} for row in rows]
    assert (batch["two"][:, 0] // 10).tolist() == rows
    assert batch["mask"].tolist() == [row % 2 == 0 for row in rows]
    assert batch["three"].shape[2] == 2
    assert batch["three"][:, 0, 1].tolist() == [float(row) for row in rows]
    return rows


def same(one, two):
    assert list(one) == list(two)
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == two[key].dtype
            assert torch.equal(value, two[key])
        else:
            assert value == two[key]


def pickled_and_back(value):
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - just written here


def shares_memory(one, two):
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


# --- size, dictionary, device


def test_size():
    assert BatchedDataDict().size == 0
    assert BatchedDataDict(a=torch.zeros(0, 3)).size == 0
    assert BatchedDataDict(a=["x", "y"]).size == 2
    assert make_batch(5).size == 5


def test_is_a_dictionary():
    batch = BatchedDataDict({"a": [1]}, b=[2])
    assert dict(batch) == {"a": [1], "b": [2]}
    assert batch.get_dict() is batch.data
    assert batch.get_multimodal_dict() == {}
    assert batch.micro_batch_indices is batch.micro_batch_lengths is batch.elem_counts_per_gb is None


def test_to_moves_tensors_in_place():
    batch = make_batch(2)
    assert batch.to("meta") is batch
    assert batch["one"].device.type == "meta"
    assert batch["text"] == ["row 0", "row 1"]


@pytest.mark.parametrize("value", [3, "abc", np.zeros(3), (1, 2), None, torch.tensor(1)])
def test_values_without_rows_are_refused(value):
    batch = BatchedDataDict(odd=value)
    for call in (
        lambda: batch.size,
        lambda: batch.chunk(0, 1),
        lambda: batch.slice(0, 0),
        lambda: batch.select_indices([]),
        lambda: batch.repeat_interleave(2),
        lambda: batch.reorder_data([]),
        lambda: batch.shard_by_batch_size(1),
        lambda: batch.make_microbatch_iterator(1),
        lambda: BatchedDataDict.from_batches([batch]),
    ):
        with pytest.raises(BatchTypeError, match="'odd'"):
            call()


def test_type_errors_are_of_all_the_classes_that_callers_may_expect():
    for expected in (TypeError, NotImplementedError, ValueError, AssertionError):
        with pytest.raises(expected):
            BatchedDataDict.from_batches([{"odd": 1.5}])


def test_values_of_different_row_counts():
    batch = BatchedDataDict(a=torch.zeros(3), b=["x"])
    for call in (lambda: batch.chunk(0, 1), lambda: batch.slice(0, 1), lambda: batch.reorder_data([0, 1, 2])):
        with pytest.raises(BatchError, match=r"same number of rows.*\{'a': 3, 'b': 1\}"):
            call()


# --- from_batches


def test_from_batches_joins_and_pads_on_the_right():
    joined = BatchedDataDict.from_batches(
        [
            {"ids": torch.tensor([[1, 2, 3]]), "n": torch.tensor([3]), "t": ["a"]},
            {"ids": torch.tensor([[4], [5]]), "n": torch.tensor([1, 1]), "t": ["b", "c"]},
        ],
        pad_value_dict={"ids": 9},
    )
    assert joined["ids"].tolist() == [[1, 2, 3], [4, 9, 9], [5, 9, 9]]
    assert joined["n"].tolist() == [3, 1, 1]
    assert joined["t"] == ["a", "b", "c"]
    assert list(joined) == ["ids", "n", "t"]


def test_from_batches_pads_with_0_and_keeps_dtypes():
    joined = BatchedDataDict.from_batches(
        [{"x": torch.ones(1, 1, dtype=torch.bool)}, {"x": torch.ones(1, 2, dtype=torch.bool)}]
    )
    assert joined["x"].tolist() == [[True, False], [True, True]]
    assert joined["x"].dtype == torch.bool


def test_from_batches_keeps_the_shape_of_three_dimensions():
    one, two = torch.ones(1, 1, 2), torch.full((1, 3, 2), 2.0)
    joined = BatchedDataDict.from_batches([{"x": one}, {"x": two}], {"x": -1})
    assert joined["x"].tolist() == [[[1, 1], [-1, -1], [-1, -1]], [[2, 2]] * 3]


def test_from_batches_takes_one_dimension_among_two_as_rows_of_one():
    joined = BatchedDataDict.from_batches([{"x": torch.tensor([7, 8])}, {"x": torch.tensor([[1, 2]])}])
    assert joined["x"].tolist() == [[7, 0], [8, 0], [1, 2]]


def test_from_batches_of_nothing():
    assert dict(BatchedDataDict.from_batches([])) == {}
    assert dict(BatchedDataDict.from_batches([{}, {}])) == {}


def test_from_batches_returns_its_class_and_a_copy():
    batch = make_batch(2)
    joined = SlicedDataDict.from_batches([batch])
    assert type(joined) is SlicedDataDict
    assert not shares_memory(joined["two"], batch["two"])


def test_from_batches_takes_the_union_of_keys():
    with pytest.raises(KeyError) as caught:
        BatchedDataDict.from_batches([{"a": [1]}, {"a": [2], "b": [3]}, {"b": [4]}])
    assert str(caught.value).startswith("key 'a' is missing from batch 2 of 3")
    with pytest.raises(BatchKeyError, match="key 'b' is missing from batch 0 of 2"):
        BatchedDataDict.from_batches([{"a": [1]}, {"a": [2], "b": [3]}])


def test_from_batches_lets_batches_without_rows_lack_keys_and_not_widen_others():
    joined = BatchedDataDict.from_batches(
        [{}, {"x": torch.zeros(0, 9), "t": []}, {"x": torch.ones(1, 2), "t": ["a"], "n": torch.ones(1)}]
    )
    assert joined["x"].tolist() == [[1, 1]]
    assert joined["t"] == ["a"]
    assert joined["n"].tolist() == [1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([torch.zeros(1, 2, 3), torch.zeros(1, 2, 4)], "only dimensions 0 .* and 1 .* may differ"),
        ([torch.zeros(1, 2), torch.zeros(1, 2, 4)], "only dimensions 0 .* and 1 .* may differ"),
        ([torch.zeros(1), ["a"]], "tensors in some batches and lists in others"),
        ([torch.zeros(1), torch.zeros(1, device="meta")], r"several devices \['cpu', 'meta'\]"),
    ],
)
def test_from_batches_of_what_cannot_be_joined(values, message):
    with pytest.raises(BatchError, match=message):
        BatchedDataDict.from_batches([{"x": value} for value in values])


def test_from_batches_checks_each_batch():
    with pytest.raises(BatchError, match=r"all values of batch 1 must have the same number of rows"):
        BatchedDataDict.from_batches([{"x": [1], "y": [1]}, {"x": [1], "y": [1, 2]}])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=5))
def test_from_batches_and_back(shapes):
    batches = [make_batch(rows, width) for rows, width in shapes]
    before = copy.deepcopy(batches)
    joined = BatchedDataDict.from_batches(batches, {"two": -5, "three": 7})
    widest = max((width for rows, width in shapes if rows), default=None)
    start = 0
    for batch, untouched, (rows, width) in zip(batches, before, shapes, strict=True):
        same(batch, untouched)
        part = joined.slice(start, start + rows)
        start += rows
        if not rows:
            continue
        for key, pad in (("two", -5), ("three", 7)):
            assert part[key].shape[1] == widest
            assert (part[key][:, width:] == pad).all()
            part[key] = part[key][:, :width]
        assert numbers(part) == list(range(rows))
    assert joined.size == start


# --- chunk, slice, get_batch, microbatches


@given(st.integers(1, 5), st.integers(0, 4))
def test_chunks_make_the_whole(chunks, length):
    batch = make_batch(chunks * length)
    parts = [batch.chunk(rank, chunks) for rank in range(chunks)]
    assert all(type(part) is SlicedDataDict for part in parts)
    assert [row for part in parts for row in numbers(part)] == list(range(chunks * length))


def test_chunk_accepts_exactly_the_ranks_that_there_are():
    batch = make_batch(4)
    assert numbers(batch.chunk(3, 4)) == [3]  # one row a chunk, so the rank exceeds the chunk's size
    for rank, chunks in ((2, 2), (-1, 2), (0, 0), (0, -1)):
        with pytest.raises(BatchError, match=rf"chunk {rank} of {chunks}"):
            batch.chunk(rank, chunks)
    with pytest.raises(AssertionError, match="batch of 4 rows is not a multiple of 3 chunks"):
        batch.chunk(0, 3)


def test_chunk_is_a_copy_and_slice_a_view():
    batch = make_batch(4)
    assert not shares_memory(batch.chunk(0, 1)["two"], batch["two"])
    view = batch.slice(1, 3)
    assert type(view) is SlicedDataDict
    assert numbers(view) == [1, 2]
    assert shares_memory(view["two"], batch["two"])
    view["text"].append("more")
    assert batch["text"] == [f"row {row}" for row in range(4)]


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 1), (0, 5), (5, 5)])
def test_slice_out_of_range(start, end):
    with pytest.raises(BatchError, match=rf"slice\({start}, {end}\) of a batch of 4 rows"):
        make_batch(4).slice(start, end)


def test_slice_may_be_empty():
    assert numbers(make_batch(4).slice(4, 4)) == []
    assert dict(BatchedDataDict().slice(0, 0)) == {}


def test_get_batch():
    batch = make_batch(6)
    assert numbers(batch.get_batch(1, 2)) == [2, 3]
    with pytest.raises(BatchError, match=r"slice\(4, 8\) of a batch of 6 rows"):
        batch.get_batch(1, 4)
    for index, size in ((-1, 2), (0, 0), (0, None)):
        with pytest.raises(BatchError, match=rf"get_batch\({index}, {size}\)"):
            batch.get_batch(index, size)


def test_get_batch_carries_the_metadata_of_its_batch():
    batch = make_batch(5)
    batch.micro_batch_indices = [[[0, 2]], [[0, 1], [1, 3]]]
    batch.micro_batch_lengths = [[8], [4, 6]]
    batch.elem_counts_per_gb = [2, 3]
    part = batch.get_batch(1)
    assert numbers(part) == [2, 3, 4]
    assert part.micro_batch_indices == [[[0, 1], [1, 3]]]
    assert part.micro_batch_lengths == [[4, 6]]
    assert part.elem_counts_per_gb == [3]
    with pytest.raises(BatchError, match=r"there are global batches 0\.\.1"):
        batch.get_batch(2)


def test_other_methods_drop_the_metadata():
    batch = make_batch(4)
    batch.micro_batch_indices = [[[0, 4]]]
    assert batch.slice(0, 2).micro_batch_indices is None
    assert batch.select_indices([0]).micro_batch_indices is None
    assert pickled_and_back(batch).micro_batch_indices == [[[0, 4]]]


def test_microbatches():
    batch = make_batch(6)
    parts = list(batch.make_microbatch_iterator(2))
    assert [numbers(part) for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert shares_memory(parts[1]["two"], batch["two"])
    assert list(make_batch(0).make_microbatch_iterator(2)) == []
    for wrong in (4, 0, -2):
        with pytest.raises(BatchError, match=f"6 rows is not a multiple of the microbatch size {wrong}"):
            batch.make_microbatch_iterator(wrong)


# --- sharding and reordering


def rows_of(shards):
    return [numbers(shard) for shard in shards]


def test_shards_take_their_part_of_each_global_batch():
    assert rows_of(make_batch(8).shard_by_batch_size(2, batch_size=4)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert rows_of(make_batch(8).shard_by_batch_size(2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows_of(make_batch(4).shard_by_batch_size(2, batch_size=2)) == [[0, 2], [1, 3]]


def test_uneven_shards():
    assert rows_of(make_batch(5).shard_by_batch_size(4, allow_uneven_shards=True)) == [[0, 1], [2, 3], [4], []]
    empty = make_batch(1).shard_by_batch_size(3, allow_uneven_shards=True)[2]
    assert set(empty) == set(make_batch(1))
    assert empty["two"].shape == (0, 3)
    assert empty["text"] == []


def test_shards_of_nothing():
    for uneven in (False, True):
        assert rows_of(make_batch(0).shard_by_batch_size(2, allow_uneven_shards=uneven)) == [[], []]


def test_shards_are_copies_of_their_own_rows_only():
    batch = make_batch(4)
    for shard in batch.shard_by_batch_size(2):
        assert type(shard) is SlicedDataDict
        assert shard["two"].untyped_storage().nbytes() == 2 * 3 * 8
        assert not shares_memory(shard["two"], batch["two"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shards": 3}, r"Batch size \(8\) is not a multiple of shards \(3\)"),
        ({"shards": 2, "batch_size": 3}, r"Total batch size \(8\) is not a multiple of batch_size \(3\)"),
        ({"shards": 4, "batch_size": 2}, r"Batch size \(2\) is not a multiple of shards \(4\)"),
        (
            {"shards": 2, "batch_size": 4, "allow_uneven_shards": True},
            "batch_size must be None if allow_uneven_shards is True",
        ),
        ({"shards": 0}, "0 shards of batch size None: both must be at least 1"),
        ({"shards": 2, "batch_size": 0}, "2 shards of batch size 0"),
    ],
)
def test_bad_shards(arguments, message):
    with pytest.raises(BatchError, match=message) as caught:
        make_batch(8).shard_by_batch_size(**arguments)
    assert isinstance(caught.value, AssertionError)


def test_dynamic_batching_is_refused_for_now():
    arguments = {
        "max_tokens_per_microbatch": 8,
        "sequence_length_round": 1,
        "input_key": "two",
        "input_lengths_key": "one",
    }
    with pytest.raises(NotSupported, match="dynamic_batching_args"):
        make_batch(2).shard_by_batch_size(1, dynamic_batching_args=arguments)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_shards_hold_each_global_batch_once_and_in_order(shards, per_shard, batches):
    size = shards * per_shard
    made = make_batch(size * batches).shard_by_batch_size(shards, batch_size=size)
    assert len(made) == shards
    for index in range(batches):
        together = [row for shard in made for row in numbers(shard.get_batch(index, per_shard))]
        assert together == list(range(index * size, (index + 1) * size))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_joined_shards_reorder_to_the_input(shards, per_shard, batches):
    batch = make_batch(shards * per_shard * batches)
    joined = BatchedDataDict.from_batches(batch.shard_by_batch_size(shards, batch_size=shards * per_shard))
    joined.reorder_data(joined["one"].tolist())  # each row tells where it came from
    assert numbers(joined) == list(range(batch.size))


@given(st.integers(1, 5), st.integers(0, 12))
def test_uneven_shards_joined_are_the_input(shards, rows):
    made = make_batch(rows).shard_by_batch_size(shards, allow_uneven_shards=True)
    assert [row for shard in made for row in numbers(shard)] == list(range(rows))
    assert max(shard.size for shard in made) == -(-rows // shards)


def test_reorder_applies_the_inverse_permutation():
    batch = make_batch(3)
    assert batch.reorder_data([2, 0, 1]) is None
    assert numbers(batch) == [1, 2, 0]  # the row at position 0 belongs to place 2


def test_reorder_is_stable_and_takes_tensors():
    batch = make_batch(4)
    batch.reorder_data(torch.tensor([1, 0, 1, 0]))
    assert numbers(batch) == [1, 3, 0, 2]


@given(st.permutations(list(range(7))))
def test_reorder_undoes_select(order):
    picked = make_batch(7).select_indices(order)
    assert numbers(picked) == order
    picked.reorder_data(order)
    assert numbers(picked) == list(range(7))


@pytest.mark.parametrize("indices", [[0, 1], [[0, 1, 2]], [0, 1, 2, 3]])
def test_reorder_needs_one_index_a_row(indices):
    with pytest.raises(BatchError, match="for a batch of 3 rows"):
        make_batch(3).reorder_data(indices)


# --- select, repeat, truncate


def test_select_indices():
    batch = SlicedDataDict(make_batch(4))
    assert type(batch.select_indices([0])) is SlicedDataDict
    assert numbers(batch.select_indices([3, 0, 3])) == [3, 0, 3]
    assert numbers(batch.select_indices([-1, -4])) == [3, 0]
    assert numbers(batch.select_indices(torch.tensor([2, 1], dtype=torch.int32))) == [2, 1]
    assert numbers(batch.select_indices(torch.tensor([False, True, False, True]))) == [1, 3]
    assert numbers(batch.select_indices([])) == []
    assert numbers(batch.select_indices(range(2))) == [0, 1]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([4], r"row 4 is not in the batch of 4 rows: indices are -4\.\.3"),
        ([0, -5], "row -5 is not in the batch"),
        ([0.5], "takes a list of integers or a mask of 4 bools"),
        (torch.tensor([True]), "takes a list of integers or a mask of 4 bools"),
        (torch.tensor([[0]]), "takes a list of integers or a mask of 4 bools"),
    ],
)
def test_bad_indices(indices, message):
    with pytest.raises(BatchError, match=message):
        make_batch(4).select_indices(indices)


def test_repeat_interleave_makes_independent_elements():
    repeated = make_batch(2).repeat_interleave(2)
    assert numbers(repeated) == [0, 0, 1, 1]
    repeated["objects"][0]["row"] = 9
    assert [item["row"] for item in repeated["objects"]] == [9, 0, 1, 1]
    assert numbers(make_batch(2).repeat_interleave(0)) == []
    with pytest.raises(BatchError, match=r"repeat_interleave\(-1\)"):
        make_batch(2).repeat_interleave(-1)


def test_truncate_tensors_cuts_those_that_have_the_dimension():
    batch = make_batch(2, width=4)
    whole = batch["two"]
    assert batch.truncate_tensors(1, 2) is None
    assert batch["one"].shape == (2,)
    assert batch["two"].tolist() == [[0, 1], [10, 11]]
    assert batch["three"].shape == (2, 2, 2)
    assert shares_memory(batch["two"], whole)


@pytest.mark.parametrize(("dim", "length"), [(1, 4), (2, 3), (-1, 1), (1, -1)])
def test_bad_truncation_changes_nothing(dim, length):
    batch = make_batch(2)
    with pytest.raises(BatchError, match=rf"truncate_tensors\(dim={dim}, truncated_len={length}\)"):
        batch.truncate_tensors(dim, length)
    same(batch, make_batch(2))


# --- pickling


def test_a_pickled_slice_holds_its_own_rows_only():
    batch = BatchedDataDict(x=torch.arange(100_000))
    part = batch.slice(10, 12)
    assert len(pickle.dumps(part)) < 2_000
    back = pickled_and_back(part)
    assert type(back) is SlicedDataDict
    assert back["x"].tolist() == [10, 11]
    assert shares_memory(part["x"], batch["x"])  # pickling does not change what it pickles


@given(st.integers(0, 5))
@settings(max_examples=10)
def test_pickle_gives_it_back(rows):
    same(pickled_and_back(make_batch(rows)), make_batch(rows))


def test_gradients_pass_through_from_batches_and_slice():
    one, two = torch.ones(1, 1, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    joined = BatchedDataDict.from_batches([{"x": one}, {"x": two}])
    (joined.slice(0, 2)["x"] * torch.tensor([[2.0, 0, 0], [3, 4, 5]])).sum().backward()
    assert one.grad.tolist() == [[2]]
    assert two.grad.tolist() == [[3, 4, 5]]
