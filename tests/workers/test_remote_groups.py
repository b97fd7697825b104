"""The worker groups `processes` and `ray`, beyond what the conformance suite requires of every group."""

from __future__ import annotations

import os
import platform

import pytest
import torch

from rlframework.base.errors import ConfigError, DeadlineExceeded, WorkerError, WorkerLost
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.sections import DeadlinesConfig, WorkerGroupConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers import machine
from rlframework.workers.processes import ProcessWorkerGroup

pytestmark = pytest.mark.slow

TWO = NamedSharding([0, 1], ["data_parallel"])


RAY = (pytest.mark.xdist_group("ray"), pytest.mark.thorough)  # the suite's tests of the group hold most of it


@pytest.fixture(params=["processes", pytest.param("ray", marks=RAY)])
def name(request):
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    return request.param


@pytest.fixture
def where(name):
    """The location of a rank in messages."""
    return f" on node {platform.node()}" if name == "ray" else ""


@pytest.fixture
def start(name):
    """`start(sharding, device, **deadlines)`: a group of `Probe`s, which is shut down after the test."""
    groups = []

    def make(sharding=TWO, device="cpu", **deadlines):
        from rlframework_ray.configured_group import ConfiguredRayWorkerGroup

        group_class = ConfiguredRayWorkerGroup if name == "ray" else ProcessWorkerGroup
        config = WorkerGroupConfig(name=name, num_workers=sharding.size, deadlines=DeadlinesConfig(**deadlines))
        spec = WorkerSpec("probe_workers:Probe", {"word": "hi"})
        groups.append(group_class(spec, config, sharding=sharding, device=device))
        return groups[-1]

    yield make
    for group in groups:
        group.shutdown()


def ask(group, method, **kwargs):
    return group.get_all_worker_results(group.run_all_workers_single_data(method, **kwargs))


def running(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_workers_get_their_context_and_a_process_group(start):
    group = start()
    answers = ask(group, "who")
    assert [(a["rank"], a["world_size"], a["device"], a["word"]) for a in answers] == [
        (0, 2, "cpu", "hi"),
        (1, 2, "cpu", "hi"),
    ]
    assert len({a["pid"] for a in answers} | {os.getpid()}) == 3
    assert all(a["address"] == "127.0.0.1" for a in answers)
    assert all(a["threads"] == machine.threads_per_worker(2) for a in answers)
    assert group.sharding == TWO
    assert group.get_all_worker_results(
        group.run_all_workers_sharded_data("all_reduce", in_sharded_axes=["data_parallel"], value=[3.0, 4.0])
    ) == [7.0, 7.0]
    # all_gather of batches, whose group is the one just formed: 2 rows and 1 row, lists of dictionaries, bool, bf16
    batches = [
        BatchedDataDict(ids=torch.tensor([[1, 2], [3, 4]]), ok=torch.tensor([True, False]), note=["a", "b"]),
        BatchedDataDict(ids=torch.tensor([[5, 6]]), ok=torch.tensor([True]), note=[{"c": 1}]),
    ]
    future = group.run_all_workers_sharded_data("gather_batch", in_sharded_axes=["data_parallel"], batch=batches)
    for gathered in group.get_all_worker_results(future):
        assert isinstance(gathered, BatchedDataDict)
        assert torch.equal(gathered["ids"], torch.tensor([[1, 2], [3, 4], [5, 6]]))
        assert torch.equal(gathered["ok"], torch.tensor([True, False, True]))
        assert gathered["note"] == ["a", "b", {"c": 1}]


def test_a_failing_rank_ends_the_call_at_once(start, where):
    group = start()
    pids = [answer["pid"] for answer in ask(group, "who")]
    with pytest.raises(WorkerError, match=rf"^rank 1 of 2{where} failed in fail: Plain: bad thing on 1\n") as caught:
        ask(group, "fail", kind="Plain", only=1)  # rank 0 sleeps for longer than a test may take
    assert "in fail\n" in str(caught.value)
    assert "probe_workers.py" in str(caught.value)
    assert running(pids) == []
    with pytest.raises(WorkerError, match="who: the worker group is no longer usable: fail ended with WorkerError"):
        ask(group, "who")
    assert group.shutdown("shutdown") is True


def test_the_dead_rank_is_named_not_the_peer_that_noticed(start, where):
    group = start()
    assert ask(group, "all_reduce", value=1) == [2.0, 2.0]
    with pytest.raises(WorkerError, match=rf"^the process of rank 1 of 2{where} died in wait_for_peer: "):
        ask(group, "wait_for_peer", only=1)
    with pytest.raises(WorkerLost, match="all_reduce: the worker group is no longer usable: wait_for_peer ended with"):
        ask(group, "all_reduce", value=1)  # so that a caller that did not see the loss knows it too


def test_a_missed_deadline_names_rank_and_setting(start, where):
    group = start()
    pids = [answer["pid"] for answer in ask(group, "who")]
    call = group.run_all_workers_single_data("sleep", seconds=600, only=1)
    # when rank 0 has answered the second call, it has answered the first
    group.get_all_worker_results(group.run_single_worker_single_data("who", worker_idx=0))
    group._deadlines = DeadlinesConfig(call=1.5)
    message = rf"^sleep: no answer within 1\.5 s from rank 1 of 2{where}; answered: 0\. .*group\.deadlines\.call$"
    with pytest.raises(DeadlineExceeded, match=message):
        group.get_all_worker_results(call)
    assert running(pids) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_more_workers_than_gpus(start):
    with pytest.raises(ConfigError, match=r"num_workers=2 on device cuda, but there are 0 GPU\(s\)"):
        start(device="cuda")


def test_ranks_must_be_those_of_a_group(start):
    with pytest.raises(ValueError, match=r"the sharding must hold the ranks 0\.\.1"):
        start(NamedSharding([1, 2], ["data_parallel"]))
