from __future__ import annotations

import numpy as np
import pytest
import torch
from probe_batches import make_batch, numbers, pickled_and_back, same, shares_memory

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework.batch.batched_data_dict import BatchedDataDict, SlicedDataDict

# --- size, dictionary, device


def test_is_a_dictionary():
    batch = BatchedDataDict({"a": [1]}, b=[2])
    assert dict(batch) == {"a": [1], "b": [2]}
    assert batch.get_dict() is batch.data
    assert batch.get_multimodal_dict() == {}
    assert BatchedDataDict().size == 0
    assert batch.micro_batch_indices is batch.micro_batch_lengths is batch.elem_counts_per_gb is None


def test_to_moves_tensors_in_place():
    batch = make_batch(2)
    assert batch.to("meta") is batch
    assert batch["one"].device.type == "meta"
    assert batch["text"] == ["row 0", "row 1"]


@pytest.mark.parametrize("value", [3, "abc", np.zeros(3), (1, 2), None, torch.tensor(1)])
def test_values_without_rows_are_rejected(value):
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


def test_type_errors_have_all_the_classes_that_callers_may_expect():
    for expected in (TypeError, NotImplementedError, ValueError, AssertionError):
        with pytest.raises(expected):
            BatchedDataDict.from_batches([{"odd": 1.5}])


def test_a_batch_is_shown_by_names_and_shapes():
    batch = BatchedDataDict(ids=torch.zeros(64, 20, dtype=torch.int64), texts=["a"] * 64)
    assert repr(batch) == "<BatchedDataDict: ids torch.int64 of shape [64, 20], texts a list>"


def test_values_of_different_row_counts():
    batch = BatchedDataDict(a=torch.zeros(3), b=["x"])
    for call in (lambda: batch.chunk(0, 1), lambda: batch.slice(0, 1), lambda: batch.reorder_data([0, 1, 2])):
        with pytest.raises(BatchError, match=r"same number of rows.*\{'a': 3, 'b': 1\}"):
            call()


def test_invalid_devices():
    for wrong in ("nonsense", object(), None, 10**30):
        for call in (BatchedDataDict(x=[1]).to, BatchedDataDict(x=[1]).get_multimodal_dict):
            with pytest.raises(BatchError, match="is not a device"):
                call(device=wrong) if wrong is not None else BatchedDataDict().to(wrong)
    with pytest.raises(BatchError, match="'x' cannot be moved to cuda:77"):
        BatchedDataDict(x=torch.ones(1)).to("cuda:77")
    with pytest.raises(BatchError, match="'x' cannot be moved to cpu"):
        BatchedDataDict(x=torch.ones(1, device="meta")).to("cpu")


# --- chunk, slice, get_batch, microbatches


def test_chunk_accepts_exactly_the_existing_ranks():
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


def test_get_batch():
    batch = make_batch(6)
    assert numbers(batch.get_batch(1, 2)) == [2, 3]
    with pytest.raises(BatchError, match=r"slice\(4, 8\) of a batch of 6 rows"):
        batch.get_batch(1, 4)
    for index, size in ((-1, 2), (0, 0), (0, None)):
        with pytest.raises(BatchError, match=rf"get_batch\({index}, {size}\)"):
            batch.get_batch(index, size)


def test_get_batch_keeps_the_metadata_of_its_global_batch():
    batch = make_batch(5)
    batch.micro_batch_indices = [[[0, 2]], [[0, 1], [1, 3]]]
    batch.micro_batch_lengths = [[8], [4, 6]]
    batch.elem_counts_per_gb = [2, 3]
    part = batch.get_batch(1)
    assert numbers(part) == [2, 3, 4]
    assert part.micro_batch_indices == [[[0, 1], [1, 3]]]
    assert part.micro_batch_lengths == [[4, 6]]
    assert part.elem_counts_per_gb == [3]
    with pytest.raises(BatchError, match="there are 2 global batches, numbered from 0"):
        batch.get_batch(2)


def test_other_methods_drop_the_metadata():
    batch = make_batch(4)
    batch.micro_batch_indices = [[[0, 4]]]
    assert batch.slice(0, 2).micro_batch_indices is None
    assert batch.select_indices([0]).micro_batch_indices is None
    assert pickled_and_back(batch).micro_batch_indices == [[[0, 4]]]


@pytest.mark.parametrize("wrong", [4, 0, -2])
def test_microbatches_that_do_not_divide(wrong):
    with pytest.raises(BatchError, match=f"6 rows is not a multiple of the microbatch size {wrong}"):
        make_batch(6).make_microbatch_iterator(wrong)


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
        ([0.5], r"select_indices takes integers, got torch.float32 of shape \[1\]"),
        (["x"], r"select_indices takes integers, got \['x'\]"),
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


def test_truncate_tensors_truncates_tensors_that_have_the_dimension():
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


# --- sharding and reordering


def rows_of(shards):
    return [numbers(shard) for shard in shards]


def test_each_shard_gets_its_share_of_each_global_batch():
    assert rows_of(make_batch(8).shard_by_batch_size(2, batch_size=4)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert rows_of(make_batch(8).shard_by_batch_size(2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows_of(make_batch(4).shard_by_batch_size(2, batch_size=2)) == [[0, 2], [1, 3]]


def test_uneven_shards():
    assert rows_of(make_batch(5).shard_by_batch_size(4, allow_uneven_shards=True)) == [[0, 1], [2, 3], [4], []]
    empty = make_batch(1).shard_by_batch_size(3, allow_uneven_shards=True)[2]
    assert type(empty) is SlicedDataDict
    assert set(empty) == set(make_batch(1))
    assert empty["two"].shape == (0, 3)
    assert empty["text"] == []


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
        ({"shards": 0}, "0 shards with batch size None: both must be at least 1"),
        ({"shards": 2, "batch_size": 0}, "2 shards with batch size 0"),
    ],
)
def test_bad_shards(arguments, message):
    with pytest.raises(BatchError, match=message) as caught:
        make_batch(8).shard_by_batch_size(**arguments)
    assert isinstance(caught.value, AssertionError)


def test_reorder_applies_the_inverse_permutation():
    batch = make_batch(3)
    assert batch.reorder_data([2, 0, 1]) is None
    assert numbers(batch) == [1, 2, 0]  # the row at position 0 has sort key 2


def test_reorder_is_stable_and_takes_tensors():
    batch = make_batch(4)
    batch.reorder_data(torch.tensor([1, 0, 1, 0]))
    assert numbers(batch) == [1, 3, 0, 2]


@pytest.mark.parametrize("indices", [[0, 1], [[0, 1, 2]], [0, 1, 2, 3]])
def test_reorder_needs_one_index_per_row(indices):
    with pytest.raises(BatchError, match="for a batch of 3 rows"):
        make_batch(3).reorder_data(indices)


# --- gradients


def test_gradients_pass_through_from_batches_and_slice():
    one, two = torch.ones(1, 1, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    joined = BatchedDataDict.from_batches([{"x": one}, {"x": two}])
    (joined.slice(0, 2)["x"] * torch.tensor([[2.0, 0, 0], [3, 4, 5]])).sum().backward()
    assert one.grad.tolist() == [[2]]
    assert two.grad.tolist() == [[3, 4, 5]]
