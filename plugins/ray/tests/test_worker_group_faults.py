"""`RayWorkerGroup` with two workers: errors, lost workers, and what is left after the end."""

from __future__ import annotations

import os
import socket
import sys

import pytest
import ray
from kept_ray_groups import PLAIN, pids_of, running
from ray.util.placement_group import placement_group_table

from rlframework.base.errors import BatchError, UserError, WorkerError
from rlframework_ray import runtime
from rlframework_ray.ray_group import MultiWorkerFuture, RayWorkerBuilder, RayWorkerGroup
from rlframework_ray.virtual_cluster import RayVirtualCluster

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_session")]


# -- faults -----------------------------------------------------------------------------------------------------------


def fails(group, method, expected=WorkerError, /, **kwargs):
    """The error of a call to all workers, which no other rank ends within the time of a test."""
    refs = group.run_all_workers_single_data(method, **kwargs)
    with pytest.raises(expected) as told:
        MultiWorkerFuture(refs).get_results(group)
    return told.value


def ended(group, pids):
    """Whether a group is unusable and its processes are gone."""
    with pytest.raises(WorkerError, match="no longer usable"):
        group.run_all_workers_single_data("who")
    return running(pids) == [] and group.workers == []


@pytest.mark.thorough
def test_a_killed_worker_fails_the_call_and_the_others_are_released(group):
    pids = pids_of(group)
    error = fails(group, "die", only=1)
    assert "rank 1 of 2 on node" in str(error)
    assert "last words" in str(error)
    assert ended(group, pids)
    assert group.shutdown()
    assert group.shutdown()


@pytest.mark.parametrize(
    ("kind", "also"), [("ValueError", ValueError), ("OfThisModule", RuntimeError), ("BatchError", BatchError)]
)
def test_an_error_comes_with_rank_node_and_the_workers_own_traceback(group, kind, also):
    pids = pids_of(group)
    error = fails(group, "fail", also, kind=kind, only=1)
    told = "".join([str(error), str(error.__cause__), *getattr(error, "__notes__", ())])
    assert "rank 1 of 2 on node" in told
    assert "in fail\n" in told  # the frame of the worker's own method
    assert ended(group, pids)
    assert "probe_group_workers" not in sys.modules


def test_an_error_of_a_generator_is_reported(group):
    error = fails(group, "count", to=4)
    assert "one too many" in str(error)
    assert isinstance(error, KeyError)


def test_ray_get_raises_rays_error_and_does_not_end_the_group(group):
    with pytest.raises(ValueError, match="bad thing"):
        ray.get(group.run_single_worker_single_data("fail", 0))
    with pytest.raises(ray.exceptions.RayTaskError):
        ray.get(group.run_single_worker_single_data("unsendable", 0))
    assert len(pids_of(group)) == 2


@pytest.mark.parametrize(
    ("path", "kwargs", "parts"),
    [
        ("probe_cannot_import:Any", {}, ("a_module_that_is_nowhere", "probe_cannot_import.py")),
        ("probe_group_workers:Nobody", {}, ("has no 'Nobody'",)),
        (PLAIN, {"fail_rank": 1}, ("rank 1 of 2 on node", "cannot build rank 1", "__init__")),
    ],
)
def test_a_failed_constructor_is_reported_with_its_traceback(keeper, path, kwargs, parts):
    keeper.end()
    keeper.cluster.placements()  # its first use connects it, if this is the first test
    before = len(runtime._OWNED_BY)
    with pytest.raises((WorkerError, UserError)) as told:
        RayWorkerGroup(keeper.cluster, RayWorkerBuilder(path, **kwargs))
    text = "".join([str(told.value), str(told.value.__cause__)])
    assert all(part in text for part in parts), text
    assert len(runtime._OWNED_BY) == before
    assert not keeper.cluster.groups


# -- the end ----------------------------------------------------------------------------------------------------------


def test_shutdown_leaves_no_process_placement_group_or_port(keeper, tmp_path):
    group = keeper.give()
    who = ray.get(group.run_all_workers_single_data("who"))
    placement_group = keeper.cluster.get_placement_groups()[0]
    assert group.shutdown("tidy")
    assert running([each["pid"] for each in who]) == []
    with socket.socket() as free:
        free.bind((who[0]["MASTER_ADDR"], int(who[0]["MASTER_PORT"])))
    assert group.workers == []
    assert keeper.cluster.shutdown()
    assert placement_group_table(placement_group)["state"] == "REMOVED"


@pytest.mark.thorough
def test_force_skips_the_cleanup(make):
    group = make(PLAIN)
    pids = pids_of(group)
    assert group.shutdown("block", force=True)
    assert running(pids) == []
    assert group.shutdown("fail")  # not called: they are gone


@pytest.mark.gpu
@pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="needs a GPU")
def test_two_groups_have_half_a_gpu_each(ray_session):
    cluster = RayVirtualCluster([1], use_gpus=True, max_colocated_worker_groups=2, max_retries=1)
    groups = [RayWorkerGroup(cluster, RayWorkerBuilder(PLAIN)) for _ in range(2)]
    try:
        seen = [ray.get(group.run_single_worker_single_data("who", 0))["gpus"] for group in groups]
        assert seen[0] == seen[1]
        assert len(seen[0]) == 1
        assert ray.available_resources().get("GPU", 0) == ray.cluster_resources()["GPU"] - 1
    finally:
        for group in groups:
            group.shutdown()
        cluster.shutdown()
