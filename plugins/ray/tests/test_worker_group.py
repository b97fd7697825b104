"""`RayWorkerGroup` with two workers: ranks, calls, environments, options, errors, lost workers, and the end."""

from __future__ import annotations

import os
import socket
import sys

import pytest
import ray
from kept_ray_groups import PLAIN, pids_of, running
from ray.util.placement_group import placement_group_table

from rlframework.base.errors import BatchError, UserError, WorkerError
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework_ray import runtime
from rlframework_ray.ray_group import MultiWorkerFuture, RayWorkerBuilder, RayWorkerGroup
from rlframework_ray.virtual_cluster import RayVirtualCluster

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_session")]

TENSOR = NamedSharding([[0, 1]], ["data_parallel", "tensor_parallel"])


# -- who they are -----------------------------------------------------------------------------------------------------


def test_workers_get_their_ranks_and_the_driver_does_not_import_them(group):
    zero, one = ray.get(group.run_all_workers_single_data("who"))
    assert [(w["RANK"], w["LOCAL_RANK"], w["NODE_RANK"], w["WORLD_SIZE"]) for w in (zero, one)] == [
        ("0", "0", "0", "2"),
        ("1", "1", "0", "2"),
    ]
    assert zero["MASTER_ADDR"] == one["MASTER_ADDR"] == "127.0.0.1"
    assert zero["MASTER_PORT"] == one["MASTER_PORT"]
    assert ray.get(group.run_single_worker_single_data("bind_master", 0))  # it is reserved for the workers
    assert zero["words"] == ("a word",)
    assert zero["named"] == {"more": 1}
    assert not zero["torch"]
    assert len({zero["pid"], one["pid"], os.getpid()}) == 3
    assert "probe_group_workers" not in sys.modules


def test_metadata_describe_each_worker(group):
    assert group.worker_metadata == [
        {
            "node_idx": 0,
            "local_rank": 0,
            "global_rank": rank,
            "name": f"-0-{rank}",
            "bundle_indices": (0, [rank]),
            "dp_shard_idx": rank,
        }
        for rank in (0, 1)
    ]
    assert (group.dp_size, group.get_dp_leader_worker_idx(1)) == (2, 1)
    for wrong in (2, -1):
        with pytest.raises(IndexError, match=f"dp_shard_idx {wrong}"):
            group.get_dp_leader_worker_idx(wrong)


def test_handles_behave_like_rays_handles(group):
    assert len(group.workers) == 2
    assert ray.get([worker.echo.remote(value=3) for worker in group.workers]) == [(0, {"value": 3}), (1, {"value": 3})]
    assert ray.get(group.workers[1]._private.remote()) == "private"
    assert all(isinstance(worker, ray.actor.ActorHandle) for worker in group.workers)


# -- calls ------------------------------------------------------------------------------------------------------------


def test_calls_return_references_or_a_future(make):
    group = make(PLAIN, options={"sharding_annotations": TENSOR})
    only = {"run_rank_0_only_axes": ["tensor_parallel"]}
    assert ray.get(group.run_single_worker_single_data("echo", 1, value=5)) == (1, {"value": 5})
    assert ray.get(group.run_all_workers_single_data("echo", value=5)) == [(0, {"value": 5}), (1, {"value": 5})]
    assert ray.get(group.run_all_workers_single_data("echo", value=5, **only)) == [(0, {"value": 5})]
    refs = group.run_all_workers_multiple_data("echo", value=[5, 6], common_kwargs={"same": 7})
    assert ray.get(refs) == [(0, {"value": 5, "same": 7}), (1, {"value": 6, "same": 7})]
    shards = {"in_sharded_axes": ["data_parallel"], "value": [5], "common_kwargs": {"same": 7}}
    dummy = group.run_all_workers_sharded_data("echo", make_dummy_calls_to_free_axes=True, **shards)
    assert ray.get(dummy.futures) == [(0, {"value": 5, "same": 7}), None]
    assert dummy.get_results(group) == [(0, {"value": 5, "same": 7})]
    once = group.run_all_workers_sharded_data(
        "echo", replicate_on_axes=["tensor_parallel"], output_is_replicated=["tensor_parallel"], **shards
    )
    assert group.get_all_worker_results(once) == [(0, {"value": 5, "same": 7})]
    assert (once.called_workers, once.return_from_workers) == ([0, 1], [0])


def test_without_annotations_only_what_needs_them_fails(group):
    group.sharding_annotations = None
    assert len(ray.get(group.run_all_workers_single_data("echo"))) == 2
    assert len(ray.get(group.run_all_workers_multiple_data("echo", value=[1, 2]))) == 2
    with pytest.raises(ValueError, match="sharding_annotations"):
        group.run_all_workers_sharded_data("echo")
    with pytest.raises(ValueError, match="sharding_annotations"):
        group.run_all_workers_single_data("echo", run_rank_0_only_axes=["data_parallel"])


def test_an_unknown_method_or_an_unpicklable_argument_reaches_no_worker(group):
    with pytest.raises(AttributeError, match="did you mean 'echo'"):
        group.run_all_workers_single_data("ecko")
    with pytest.raises(TypeError, match="picklable"):
        group.run_all_workers_single_data("echo", value=(each for each in ()))
    assert len(pids_of(group)) == 2


def test_items_of_generators_are_concatenated(group):
    future = MultiWorkerFuture(group.run_all_workers_single_data("count", to=2))
    assert future.get_results(group) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    with_filter = MultiWorkerFuture(group.run_all_workers_single_data("count", to=1), [1], [0, 1])
    assert with_filter.get_results(group) == [(0, 0), (1, 0)]  # a stream is not filtered
    proxies = MultiWorkerFuture(group.run_all_workers_single_data("count", to=2), [1], [0, 1])
    (proxy,) = proxies.get_results(group, return_generators_as_proxies=True)
    assert [ray.get(ref) for ref in proxy] == [(1, 0), (1, 1)]


# -- environment and options ------------------------------------------------------------------------------------------


def test_only_named_variables_reach_a_worker_and_dictionaries_are_unchanged(make, monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_OF_THE_DRIVER", "x")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexport OF_THE_PYTHON=yes\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    env_vars = {"GIVEN": "here", "RANK": "not me"}
    runtime_env = {"py_executable": str(python), "env_vars": {"BESIDE": "this"}}
    group = make(PLAIN, options={"env_vars": env_vars, "runtime_env": runtime_env})
    names = ["SECRET_OF_THE_DRIVER", "GIVEN", "BESIDE", "RANK", "OF_THE_PYTHON"]
    assert ray.get(group.run_single_worker_single_data("variables", 1, names=names)) == {
        "SECRET_OF_THE_DRIVER": None,
        "GIVEN": "here",
        "BESIDE": "this",
        "RANK": "1",
        "OF_THE_PYTHON": "yes",
    }
    assert env_vars == {"GIVEN": "here", "RANK": "not me"}
    assert runtime_env == {"py_executable": str(python), "env_vars": {"BESIDE": "this"}}


def test_configure_worker_overrides_the_caller_and_gets_tied_bundles(make):
    tied = {"bundle_indices_list": [(0, [1, 0])], "env_vars": {"FROM_CALLER": "caller"}, "name_prefix": "tied"}
    group = make("probe_group_workers:Configured", options=tied)
    leader, led = ray.get(group.run_all_workers_single_data("tell"))
    bundles = "(0, [1, 0])"
    assert leader == {
        "OF_CONFIGURE": bundles,
        "FROM_CALLER": "configured",
        "RANK": "0",
        "seed": 7,
        "at_import": bundles,  # the variables are there before the module is
    }
    assert led == {"OF_CONFIGURE": "None", "FROM_CALLER": "led", "RANK": "1", "at_import": "None"}
    assert (group.dp_size, group.dp_leader_worker_indices) == (1, [0])
    assert [each["name"] for each in group.worker_metadata] == ["tied-grp0-0", "tied-grp0-1"]
    assert [each["bundle_indices"] for each in group.worker_metadata] == [(0, [1, 0]), None]
    assert [each["local_rank"] for each in group.worker_metadata] == [0, 1]
    assert ray.get(ray.get_actor("tied-grp0-0").__ray_ready__.remote())


@pytest.mark.thorough
def test_configure_worker_may_return_a_runtime_environment(make):
    group = make("probe_group_workers:WithRuntime", options={"workers_per_node": 1, "sharding_annotations": None})
    assert ray.get(group.run_all_workers_single_data("tell")) == [(8, "yes")]


def test_coroutines_of_a_worker_run_concurrently(make):
    group = make("probe_group_workers:Coroutines", options={"workers_per_node": [1], "sharding_annotations": None})
    waiting = group.run_single_worker_single_data("wait", 0)
    ray.get(group.run_single_worker_single_data("bring", 0))
    assert ray.get(waiting, timeout=20) == "came"
    assert ray.get(group.run_single_worker_single_data("plain", 0)) == "plain"
    assert MultiWorkerFuture(group.run_all_workers_single_data("count", to=2)).get_results(group) == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers_per_node": 3}, "workers_per_node=3"),
        ({"workers_per_node": [1, 1]}, "nodes have"),
        ({"workers_per_node": "all"}, "a number, a list"),
        ({"workers_per_node": True}, "a number, a list"),
        ({"workers_per_node": 0}, "at least one worker"),
        ({"bundle_indices_list": [(0, [2])]}, "no bundle 2 on node 0"),
        ({"sharding_annotations": NamedSharding([0, 1, 2], ["x"])}, r"ranks 0\.\.1"),
    ],
)
def test_an_invalid_selection_of_bundles_starts_nothing(keeper, options, message):
    keeper.end()
    with pytest.raises(ValueError, match=message) as told:
        RayWorkerGroup(keeper.cluster, RayWorkerBuilder(PLAIN), **options)
    assert isinstance(told.value, UserError)


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
