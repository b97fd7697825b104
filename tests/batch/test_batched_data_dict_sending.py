"""Batches sent to other processes: complete, without extra bytes, and owned by the receiver."""

from __future__ import annotations

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from rlframework.batch.batched_data_dict import BatchedDataDict, SlicedDataDict
from rlframework.batch.packed_tensor import PackedTensor

pytestmark = pytest.mark.slow

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def loads(written, **more):
    return pickle.loads(written, **more)  # noqa: S301 - written here


def bits(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8).tolist()


class Mine(BatchedDataDict):
    pass


def with_metadata(batch):
    batch.micro_batch_indices = [[[0, 2]], [[0, 1], [1, 3]]]
    batch.micro_batch_lengths = [[8], [4, 6]]
    batch.elem_counts_per_gb = [2, 3]
    batch.micro_batch_input_key = "ids"
    return batch


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_protocol(dtype, protocol):
    values = torch.arange(6).to(dtype) if dtype != torch.bool else torch.arange(6) % 2 == 0
    cases = {
        "plain": values.reshape(2, 3),
        "transposed": values.reshape(3, 2).T,
        "stepped": values.reshape(2, 3)[:, ::2],
        "expanded": values[:2, None].expand(2, 4),
        "empty": values[:0].reshape(2, 0),
        "one of any stride": values[::2][1:2],
    }
    back = loads(pickle.dumps(BatchedDataDict(cases), protocol=protocol))
    for name, value in cases.items():
        assert back[name].dtype == dtype
        assert back[name].shape == value.shape
        assert bits(back[name]) == bits(value)
        assert back[name].is_contiguous()
        assert back[name].untyped_storage().nbytes() == value.numel() * value.element_size()
        back[name].copy_(torch.zeros_like(value))  # writable


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_class_metadata_and_other_values(protocol):
    batch = with_metadata(Mine(ids=torch.ones(5, 1), text=list("abcde"), p=PackedTensor([None] * 5, 1)))
    back = loads(pickle.dumps(batch, protocol=protocol))
    assert type(back) is Mine
    assert vars(back) | {"data": None} == vars(batch) | {"data": None}
    assert back.micro_batch_lengths == [[8], [4, 6]]
    assert back["text"] == list("abcde")
    assert len(back["p"]) == 5
    assert back.get_batch(1)["text"] == list("cde")


def test_views_are_sent_without_their_storage_and_senders_keep_theirs():
    batch = BatchedDataDict(x=torch.arange(100_000), y=torch.arange(200_000).reshape(-1, 2).T.contiguous().T)
    part = batch.slice(10, 12)
    for protocol in PROTOCOLS:
        assert len(pickle.dumps(part, protocol=protocol)) < 2_000
    assert ForkingPickler.loads(bytes(ForkingPickler.dumps(part)))["x"].tolist() == [10, 11]
    assert part["x"].untyped_storage().data_ptr() == batch["x"].untyped_storage().data_ptr()
    assert not batch["x"].is_shared()
    assert loads(pickle.dumps(part))["y"].tolist() == [[20, 21], [22, 23]]


def test_a_tensor_under_two_keys_is_pickled_once_and_stays_shared():
    value = torch.zeros(1000)
    batch = BatchedDataDict(a=value, b=value)
    for protocol in PROTOCOLS[2:]:
        written = pickle.dumps(batch, protocol=protocol)
        assert len(written) < 6_000
        back = loads(written)
        assert back["a"] is back["b"]
    copied = copy.deepcopy(batch)
    assert copied["a"] is copied["b"] is not value


def test_out_of_band_buffers_are_copied_only_if_read_only():
    batch = BatchedDataDict(
        x=torch.arange(6.0).reshape(3, 2),
        half=torch.arange(3).to(torch.bfloat16),
        p=PackedTensor([None, torch.ones(2), None], 0),
        e=torch.zeros(3, 0),
    )
    part = batch.slice(1, 3)
    buffers = []
    head = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
    assert [len(buffer.raw()) for buffer in buffers] == [16, 4, 8]
    here = {torch.frombuffer(buffer.raw(), dtype=torch.uint8).data_ptr() for buffer in buffers}
    assert here == {part["x"].data_ptr(), part["half"].data_ptr(), part["p"].tensors[0].data_ptr()}

    writable = [bytearray(buffer.raw()) for buffer in buffers]
    there = loads(head, buffers=writable)
    assert there["x"].data_ptr() == torch.frombuffer(writable[0], dtype=torch.uint8).data_ptr()
    there["x"].zero_()
    assert bytes(writable[0]) == bytes(16)
    assert part["x"].tolist() == [[2, 3], [4, 5]]

    read_only = [bytes(buffer.raw()) for buffer in buffers]
    kept = [bytes(buffer) for buffer in read_only]
    there = loads(head, buffers=read_only)
    for value in (there["x"], there["half"], there["p"].tensors[0]):
        value.add_(1)
    assert there["x"].tolist() == [[3, 4], [5, 6]]
    assert read_only == kept


def test_buffers_that_are_not_aligned():
    batch = BatchedDataDict(x=torch.arange(3, dtype=torch.int64))
    buffers = []
    head = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    shifted = bytearray(1) + bytearray(buffers[0].raw())
    assert loads(head, buffers=[memoryview(shifted)[1:]])["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("protocol", PROTOCOLS[2:])
def test_gradients_are_not_sent(protocol):
    leaf = torch.ones(2, requires_grad=True)
    back = loads(pickle.dumps(BatchedDataDict(a=leaf, b=leaf * 2, p=PackedTensor(leaf * 3, 0)[0:1]), protocol=protocol))
    assert not back["a"].requires_grad
    assert back["b"].tolist() == [2, 2]
    assert not back["b"].requires_grad
    assert not back["p"].tensors[0].requires_grad


def test_tensors_that_torch_pickles_itself():
    batch = BatchedDataDict(
        p=torch.nn.Parameter(torch.ones(2)), m=torch.ones(100, device="meta")[:2], s=torch.eye(2).to_sparse()
    )
    back = loads(pickle.dumps(batch))
    assert type(back["p"]) is torch.nn.Parameter
    assert back["m"].device.type == "meta"
    assert back["s"].to_dense().tolist() == [[1, 0], [0, 1]]


def test_torch_save(tmp_path):
    whole = torch.arange(100_000)
    batch = with_metadata(SlicedDataDict(x=whole[7:12], p=PackedTensor([whole[:2]] * 5, 0), t=list("abcde")))
    torch.save(batch, tmp_path / "batch.pt")
    assert (tmp_path / "batch.pt").stat().st_size < 10_000
    back = torch.load(tmp_path / "batch.pt", weights_only=False)
    assert type(back) is SlicedDataDict
    assert back["x"].tolist() == [7, 8, 9, 10, 11]
    assert back["p"].as_tensor().tolist() == [0, 1] * 5
    assert back.get_batch(1).micro_batch_lengths == [[4, 6]]


def test_conjugated_and_negated_views():
    value = torch.tensor([1 + 2j, 3 - 4j])
    back = loads(pickle.dumps(BatchedDataDict(c=value.conj(), i=value.conj().imag), protocol=5))
    assert back["c"].tolist() == [1 - 2j, 3 + 4j]
    assert back["i"].tolist() == [-2, 4]


@pytest.mark.xdist_group("ray")
def test_ray(ray_session):
    import ray

    batch = with_metadata(
        SlicedDataDict(
            big=torch.arange(200_000).reshape(2, -1),
            half=torch.ones(2, 3, dtype=torch.bfloat16),
            text=["a", "b"],
            media=PackedTensor([torch.zeros(2, 70_000), None], 1),
        )
    )
    reference = ray.put(batch)
    first, second = ray.get(reference), ray.get(reference)
    assert type(first) is SlicedDataDict
    assert vars(first) | {"data": None} == vars(batch) | {"data": None}
    first["big"].zero_()
    first["media"].tensors[0].add_(1)
    assert torch.equal(second["big"], batch["big"])
    assert second["media"].as_tensor().sum() == 0
    assert second["half"].tolist() == [[1, 1, 1]] * 2
    assert second["text"] == ["a", "b"]
