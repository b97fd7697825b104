"""Large arguments of Ray workers: stored once, read in place, and still private to the worker."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest
import torch
from probe_memory import mapping_of

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework_ray import transport
from rlframework_ray.configured_group import ConfiguredRayWorkerGroup
from rlframework_ray.plugin import RayGroupConfig

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is mapped on Linux only")
ROWS = 4096


@pytest.fixture(scope="module")
def group(ray_session):
    spec = WorkerSpec("probe_memory:Memory", {})
    sharding = NamedSharding([[0, 1]], ["data_parallel", "tensor_parallel"])
    group = ConfiguredRayWorkerGroup(spec, RayGroupConfig(name="ray", num_workers=2), sharding=sharding, device="cpu")
    yield group
    assert group.shutdown()


def ask(group, method, **kwargs):
    return group.get_all_worker_results(group.run_all_workers_single_data(method, **kwargs))


def make_batch():
    """32 MiB of tokens and 16 MiB of log-probabilities, which are a view of twice as much."""
    return BatchedDataDict(
        ids=torch.arange(ROWS * 1024).reshape(ROWS, 1024),
        logprobs=torch.ones(ROWS, 2048)[:, ::2],
        text=[f"row {row}" for row in range(ROWS)],
    )


@on_linux
@pytest.mark.parametrize("kind", [BatchedDataDict, dict, list], ids=["batch", "dictionary", "a share of its own"])
def test_workers_read_tensors_in_place(group, kind):
    batch = make_batch()
    if kind is list:
        future = group.run_all_workers_sharded_data(
            "look", in_sharded_axes=["tensor_parallel"], replicate_on_axes=["data_parallel"], value=[dict(batch)] * 2
        )
        answers = group.get_all_worker_results(future)
    else:
        answers = ask(group, "look", value=kind(batch))
    expected = {"ids": float(batch["ids"].sum()), "logprobs": ROWS * 1024.0}
    for told in answers:
        assert {key: found["sum"] for key, found in told.items()} == expected
        for found in told.values():
            assert found["stored"]
            assert found["private"]
            assert found["copied"] == 0  # kilobytes, after all of it was read


@on_linux
def test_writes_of_a_worker_are_private(group):
    import ray

    batch = make_batch()
    stored = ray.put(transport.Packed(batch))  # as `_shared` does, but held here, to look at it afterwards
    refs = [group._send(rank, "call", "spoil", True, {"value": stored}) for rank in (0, 1)]
    for copied in (ray.get(ref) for ref in refs):
        assert 0 < copied <= 8  # the page that was written to, not the megabytes
    assert int(batch["ids"][0, 0]) == 0
    assert torch.equal(ray.get(stored)["ids"], batch["ids"])
    first = ray.get(group._send(0, "call", "look", True, {"value": stored}))
    assert first["ids"]["sum"] == float(batch["ids"].sum())


def test_arguments_kept_by_a_worker_do_not_change(group):
    batch = make_batch()
    ask(group, "keep", value=batch)
    for _ in range(8):  # room that was given back would be used again
        ask(group, "look", value=BatchedDataDict(ids=torch.zeros(ROWS, 1024, dtype=torch.int64)))
    assert ask(group, "kept_sum") == [int(batch["ids"].sum())] * 2


def test_a_replicated_batch_is_stored_once(group):
    used = store_bytes()
    batch = make_batch()
    size = batch["ids"].nbytes + batch["logprobs"].nbytes
    future = group.run_all_workers_sharded_data(
        "keep", in_sharded_axes=["data_parallel"], replicate_on_axes=["tensor_parallel"], value=[batch]
    )
    group.get_all_worker_results(future)
    assert size <= store_bytes() - used < size * 1.1
    ask(group, "keep", value={"ids": torch.zeros(1)})


def store_bytes():
    """The total number of bytes ever put into the object store, as counted by the raylet."""
    import ray
    from ray._private import internal_api

    (node,) = ray.nodes()
    stats = internal_api.node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return stats.store_stats.cumulative_created_bytes


def test_the_driver_owns_results(group):
    for rank, result in enumerate(ask(group, "zeros", size=1 << 22)):
        assert result["rank"] == rank
        result["own"].add_(1)
        assert float(result["own"].sum()) == 1 << 22
        assert result["view"][:3].tolist() == [0, 2, 4]
        assert result["view"].untyped_storage().nbytes() == result["view"].nbytes
        assert result["grad"].tolist() == [1, 1]


@on_linux
def test_results_are_read_in_place_too(group):
    first = ask(group, "zeros", size=1 << 22)[0]
    lines = mapping_of(first["own"])
    assert "plasma" in lines["head"]
    assert lines["Anonymous"] == 0


def through(value):
    """A round trip as in Ray: with separate buffers, read-only at the receiver."""
    buffers = []
    head = pickle.dumps(transport.Packed(value), protocol=5, buffer_callback=buffers.append)
    return pickle.loads(head, buffers=[bytes(buffer.raw()) for buffer in buffers])  # noqa: S301 - written here


@pytest.mark.parametrize("rows", [1, 2048], ids=["small", "large"])
def test_memory_that_cannot_be_mapped_is_copied(rows):
    sent = {
        "plain": torch.arange(rows * 512).reshape(rows, 512),
        "part": torch.arange(rows * 1024).reshape(rows, 1024)[:, 3:5],
        "half": torch.ones(rows, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "array": np.arange(rows * 8.0),
        "packed": PackedTensor([torch.ones(rows, 2), None], 0),
        "none": None,
    }
    got = through(sent)
    for key in ("plain", "part", "half", "empty"):
        assert got[key].dtype == sent[key].dtype
        assert torch.equal(got[key], sent[key])
    assert got["part"].untyped_storage().nbytes() == got["part"].nbytes
    got["plain"].zero_()
    got["array"][0] = 5
    assert sent["plain"].flatten()[-1] == rows * 512 - 1
    assert sent["array"][0] == 0
    assert torch.equal(got["packed"].tensors[0], torch.ones(rows, 2))
    assert got["none"] is None


def test_a_tensor_referenced_twice_stays_one_tensor():
    tensor = torch.zeros(4)
    got = through({"a": tensor, "b": [tensor]})
    assert got["a"] is got["b"][0]


def test_gradients_and_parameters_are_pickled_by_torch():
    got = through({"leaf": torch.ones(2, requires_grad=True), "weight": torch.nn.Parameter(torch.ones(3))})
    assert got["leaf"].requires_grad
    assert type(got["weight"]) is torch.nn.Parameter


def test_unpicklable_values_raise_a_type_error():
    import threading

    with pytest.raises(TypeError, match=r"must be picklable: .*lock"):
        transport.Packed({"lock": threading.Lock()})
