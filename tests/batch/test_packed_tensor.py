from __future__ import annotations

import copy
import pickle

import pytest
import torch

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework.batch.packed_tensor import PackedTensor, sharing_media


def images():
    """Three rows: two patches, none, one patch; a patch is two numbers."""
    return PackedTensor([torch.tensor([[1.0, 2], [3, 4]]), None, torch.tensor([[5.0, 6]])], 0)


def test_rows_are_joined_on_request():
    packed = images()
    assert len(packed) == 3
    assert packed.has_media
    assert packed.as_tensor().tolist() == [[1, 2], [3, 4], [5, 6]]
    assert repr(packed) == "PackedTensor(3 rows, 2 with media, dim_to_pack=0)"
    other = PackedTensor([torch.ones(2, 1), torch.zeros(2, 2)], dim_to_pack=-1)
    assert other.as_tensor().tolist() == [[1, 0, 0]] * 2


def test_one_tensor_is_one_row_and_is_not_copied():
    row = torch.ones(2, 2)
    packed = PackedTensor(row, 0)
    assert len(packed) == 1
    assert packed.as_tensor() is row


def test_no_media():
    packed = PackedTensor.empty_like(images())
    assert (len(packed), packed.dim_to_pack, packed.has_media) == (3, 0, False)
    assert packed.as_tensor() is None
    assert PackedTensor([], 1).as_tensor("cpu") is None


def test_slices_are_rows_and_share_their_tensors():
    packed = images()
    assert packed.slice([2, 0]).as_tensor().tolist() == [[5, 6], [1, 2], [3, 4]]
    assert packed.slice([2, 0]).tensors[1] is packed.tensors[0]
    assert packed.slice(torch.tensor([-1])).as_tensor().tolist() == [[5, 6]]
    assert len(packed.slice([])) == 0
    assert packed[1:3].tensors[0] is None
    assert packed[1:3].as_tensor().tolist() == [[5, 6]]
    assert len(packed) == 3


@pytest.mark.parametrize("indices", [[3], [-4], [0.5], [True], torch.tensor([[0]]), torch.tensor([0.0])])
def test_missing_rows(indices):
    with pytest.raises(BatchError, match=r"row .* is not in a PackedTensor of 3 rows"):
        images().slice(indices)


def test_a_single_row_cannot_be_indexed():
    with pytest.raises(BatchTypeError, match=r"packed\[1\]: use packed\[start:end\]"):
        images()[1]


def test_concat_joins_rows_and_flattened_concat_makes_one_row_of_each():
    two = [images(), PackedTensor([torch.tensor([[7.0, 8]])], 0)]
    joined = PackedTensor.concat(two)
    assert [None if row is None else len(row) for row in joined.tensors] == [2, None, 1, 1]
    assert joined.as_tensor().tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    flat = PackedTensor.flattened_concat([*two, PackedTensor([None, None], 0)], 0)
    assert [None if row is None else row.tolist() for row in flat.tensors] == [[[1, 2], [3, 4], [5, 6]], [[7, 8]], None]
    with pytest.raises(BatchError, match=r"one dim_to_pack, got \[0, 1\]"):
        PackedTensor.concat([images(), PackedTensor([None], 1)])
    with pytest.raises(BatchError, match="one dim_to_pack"):
        PackedTensor.concat([])
    with pytest.raises(BatchTypeError, match="concat takes PackedTensors, got a list"):
        PackedTensor.concat([[None]])
    assert len(PackedTensor.flattened_concat([], 0)) == 0


def test_devices_and_dtypes():
    packed = images()
    moved = packed.to("meta")
    assert moved.as_tensor().device.type == "meta"
    assert packed.as_tensor().device.type == "cpu"
    assert packed.as_tensor("meta").shape == (3, 2)
    mixed = PackedTensor([torch.ones(1), torch.ones(1, device="meta")], 0)
    with pytest.raises(BatchError, match=r"are on \['cpu', 'meta'\]"):
        mixed.as_tensor()
    assert mixed.as_tensor("meta").shape == (2,)
    cast = PackedTensor([torch.ones(1), torch.ones(1, dtype=torch.int64)], 0).to(dtype=torch.bfloat16)
    assert [row.dtype for row in cast.tensors] == [torch.bfloat16, torch.int64]
    assert packed.to("cpu").tensors[0] is packed.tensors[0]


def test_rows_that_cannot_be_joined():
    with pytest.raises(BatchError, match=r"differ in dimension 0 only, got shapes \[\(1, 2\), \(1, 3\)\]"):
        PackedTensor([torch.ones(1, 2), torch.ones(1, 3)], 0).as_tensor()
    with pytest.raises(BatchError, match="differ in dimension"):
        PackedTensor([torch.ones(1, 2), torch.ones(2)], 0).as_tensor()


@pytest.mark.parametrize(
    ("tensors", "dim", "message"),
    [
        ([1, None], 0, r"got \['NoneType', 'int'\]"),
        (None, 0, r"got \['NoneType'\]"),
        ({}, 0, r"got \['dict'\]"),
        ([torch.ones(1)], 1, r"row 0 has shape \(1,\), which has no dimension 1"),
        ([None, torch.tensor(1)], 0, r"row 1 has shape \(\)"),
        ([], None, "dim_to_pack must be an integer, got None"),
        ([], True, "dim_to_pack must be an integer"),
    ],
)
def test_values_that_cannot_be_packed(tensors, dim, message):
    with pytest.raises(BatchError, match=message):
        PackedTensor(tensors, dim)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_contain_only_the_rows_elements(protocol):
    whole = torch.arange(100_000.0).reshape(-1, 2)
    packed = PackedTensor([whole[3:5], None, whole[:0]], 0)
    written = pickle.dumps(packed, protocol=protocol)
    assert len(written) < 2_000
    back = pickle.loads(written)  # noqa: S301 - just written here
    assert [None if row is None else row.tolist() for row in back.tensors] == [[[6, 7], [8, 9]], None, []]
    back.tensors[0].zero_()
    assert whole[3, 1] == 7


def test_deep_copies_are_independent_unless_media_are_shared():
    packed = images()
    copied = copy.deepcopy({"a": packed})["a"]
    copied.tensors[0].zero_()
    assert packed.tensors[0][0, 0] == 1
    assert copied.tensors[1] is None
    with sharing_media():
        shared = copy.deepcopy([packed, [1]])
    assert shared[0] is packed
    assert copy.deepcopy(packed) is not packed


def test_shallow_copies_share_tensors_and_nothing_else():
    packed = images()
    copied = copy.copy(packed)
    assert copied.tensors == packed.tensors
    assert copied.tensors is not packed.tensors
