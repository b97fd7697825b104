"""`from_batches`, and batches with media."""

from __future__ import annotations

import pytest
import torch
from probe_batches import make_batch, shares_memory

from rlframework.base.errors import BatchError, BatchKeyError, BatchTypeError
from rlframework.batch.batched_data_dict import BatchedDataDict, SlicedDataDict
from rlframework.batch.packed_tensor import PackedTensor

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


def test_from_batches_joins_1d_tensors_with_2d_ones_as_rows_of_one_element():
    joined = BatchedDataDict.from_batches([{"x": torch.tensor([7, 8])}, {"x": torch.tensor([[1, 2]])}])
    assert joined["x"].tolist() == [[7, 0], [8, 0], [1, 2]]


def test_from_batches_without_batches():
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


def test_batches_without_rows_may_lack_keys_and_do_not_widen_the_others():
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
        ([torch.zeros(1), ["a"]], "of different kinds, Tensor, list; use the same kind in all batches"),
        ([torch.zeros(1), torch.zeros(1, device="meta")], r"several devices \['cpu', 'meta'\]"),
    ],
)
def test_from_batches_rejects_values_that_cannot_be_joined(values, message):
    with pytest.raises(BatchError, match=message):
        BatchedDataDict.from_batches([{"x": value} for value in values])


def test_from_batches_checks_each_batch():
    with pytest.raises(BatchError, match=r"all values of batch 1 must have the same number of rows"):
        BatchedDataDict.from_batches([{"x": [1], "y": [1]}, {"x": [1], "y": [1, 2]}])


# --- media


def with_media():
    return BatchedDataDict(
        n=torch.arange(3),
        pixels=PackedTensor([torch.full((2, 2), 1.0), None, torch.full((1, 2), 3.0)], 0),
        grid=PackedTensor([torch.tensor([[1, 2]]), None, torch.tensor([[1, 1]])], 0),
        token_type_ids=torch.zeros(3, 4, dtype=torch.int64),
    )


def patches(batch):
    return [None if row is None else row[:, 0].tolist() for row in batch["pixels"].tensors]


def test_media_stay_with_their_rows():
    batch = with_media()
    assert batch.size == 3
    assert patches(batch.slice(1, 3)) == [None, [3]]
    assert patches(batch.chunk(0, 3)) == [[1, 1]]
    assert patches(batch.select_indices([2, 2, 1])) == [[3], [3], None]
    assert [patches(part) for part in batch.make_microbatch_iterator(1)] == [[[1, 1]], [None], [[3]]]
    assert [patches(shard) for shard in batch.shard_by_batch_size(2, allow_uneven_shards=True)] == [
        [[1, 1], None],
        [[3]],
    ]
    assert patches(batch.shard_by_batch_size(3)[2]) == [[3]]
    assert patches(batch.get_batch(2, 1)) == [[3]]
    batch.reorder_data([2, 1, 0])
    assert patches(batch) == [[3], None, [1, 1]]
    batch.truncate_tensors(1, 1)
    assert batch["pixels"].as_tensor().shape == (3, 2)
    assert batch["token_type_ids"].shape == (3, 1)
    assert batch.to("meta")["pixels"].as_tensor().device.type == "meta"


def test_from_batches_joins_media():
    joined = BatchedDataDict.from_batches([with_media(), with_media().slice(2, 3)])
    assert patches(joined) == [[1, 1], None, [3], [3]]
    text = {"n": torch.arange(2), "token_type_ids": torch.zeros(2, 4)}
    with pytest.raises(BatchKeyError, match="key 'grid' is missing from batch 1 of 3"):
        BatchedDataDict.from_batches([with_media(), text, {}])
    joined = BatchedDataDict.from_batches([text, with_media(), {}], allow_missing_packed_tensors=True)
    assert patches(joined) == [None, None, [1, 1], None, [3]]
    with pytest.raises(BatchKeyError, match="key 'n' is missing from batch 1 of 2"):
        BatchedDataDict.from_batches([text, {"token_type_ids": torch.zeros(1, 4)}], allow_missing_packed_tensors=True)
    with pytest.raises(BatchError, match="one dim_to_pack"):
        BatchedDataDict.from_batches([{"p": PackedTensor([None], 0)}, {"p": PackedTensor([None], 1)}])
    with pytest.raises(BatchTypeError, match="of different kinds, PackedTensor, list"):
        BatchedDataDict.from_batches([{"p": PackedTensor([None], 0)}, {"p": ["x"]}])


def test_repeats_share_media_or_are_rejected():
    batch = with_media()
    with pytest.raises(NotImplementedError, match=r"media of 'pixels'.*share_immutable_media=True"):
        batch.repeat_interleave(2)
    batch["log"] = [{"image": batch["pixels"][row : row + 1], "notes": []} for row in range(3)]
    repeated = batch.repeat_interleave(2, share_immutable_media=True)
    assert patches(repeated) == [[1, 1], [1, 1], None, None, [3], [3]]
    assert repeated["pixels"].tensors[0] is repeated["pixels"].tensors[1] is batch["pixels"].tensors[0]
    assert repeated["log"][0]["image"] is repeated["log"][1]["image"] is batch["log"][0]["image"]
    repeated["log"][0]["notes"].append("mine")
    assert repeated["log"][1]["notes"] == []
    del batch["pixels"], batch["grid"]
    assert batch.repeat_interleave(1)["log"][0]["image"] is not batch["log"][0]["image"]


def test_get_multimodal_dict():
    batch = with_media()
    found = batch.get_multimodal_dict()
    assert sorted(found) == ["grid", "pixels", "token_type_ids"]
    assert isinstance(found["pixels"], PackedTensor)
    found = batch.get_multimodal_dict(as_tensors=True, device="cpu", pixel_dtype=torch.bfloat16)
    assert found["pixels"].tolist() == [[1, 1], [1, 1], [3, 3]]
    assert found["pixels"].dtype == torch.bfloat16
    assert found["grid"].tolist() == [[1, 2], [1, 1]]
    assert found["grid"].dtype == torch.int64
    assert batch["pixels"].as_tensor().dtype == torch.float32
    found = batch.get_multimodal_dict(as_tensors=True, device="meta")
    assert {value.device.type for value in found.values()} == {"meta"}
    assert batch.get_multimodal_dict(device="meta")["pixels"].as_tensor().device.type == "meta"
    assert sorted(batch.slice(1, 2).get_multimodal_dict(as_tensors=True)) == ["token_type_ids"]
    assert BatchedDataDict(mm_token_type_ids=torch.ones(1, 2)).get_multimodal_dict() == {
        "mm_token_type_ids": pytest.approx(torch.ones(1, 2))
    }
    assert make_batch(2).get_multimodal_dict(as_tensors=True) == {}
