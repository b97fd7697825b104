"""A Ray cluster of three nodes on this machine, and what happens on it: a program of its own, so that no other Ray is
disturbed. Runs each scenario, and prints for each a line of JSON: its name and what it returned, or its traceback.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from rlframework.config.sections import DeadlinesConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework_ray import heartbeat
from rlframework_ray.configured_group import ConfiguredRayWorkerGroup
from rlframework_ray.plugin import RayGroupConfig
from rlframework_ray.ray_group import MultiWorkerFuture, RayWorkerBuilder, RayWorkerGroup
from rlframework_ray.virtual_cluster import RayVirtualCluster

WORKER = "probe_group_workers:Plain"
ADDRESSES = iter(f"127.0.0.{last}" for last in range(2, 100))
"""One loopback address per node. Not 127.0.0.1, which Ray replaces by the machine's external address."""


def add_node():
    return CLUSTER.add_node(num_cpus=2, node_ip_address=next(ADDRESSES))


def reserve(counts, **more):
    return RayVirtualCluster(counts, use_gpus=False, **{"max_retries": 1, "ready_timeout": 20.0, **more})


def group_on(cluster, **more):
    deadlines = DeadlinesConfig(start=60.0, call=60.0)
    return RayWorkerGroup(cluster, RayWorkerBuilder(WORKER), deadlines=deadlines, **more)


def told(action):
    """The error of `action`: its classes, its message, and the seconds until it was raised."""
    begun = time.monotonic()
    try:
        action()
    except Exception as error:  # noqa: BLE001 - told
        names = [kind.__name__ for kind in type(error).__mro__]
        return {"classes": names, "message": str(error), "seconds": time.monotonic() - begun}
    return {"classes": [], "message": "nothing was raised", "seconds": time.monotonic() - begun}


def free_cpus():
    """Waits until all CPUs are free again, at most a minute."""
    total = ray.cluster_resources()["CPU"]
    until = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) != total and time.monotonic() < until:
        time.sleep(0.1)
    return ray.available_resources().get("CPU", 0) == total


def one_group_a_node(nodes):
    cluster = reserve([2, 0, 2, 1])
    group = group_on(cluster)
    who = ray.get(group.run_all_workers_single_data("who"))
    answer = {
        "nodes": [each["node"] for each in who],
        "node_ranks": [each["NODE_RANK"] for each in who],
        "local_ranks": [each["LOCAL_RANK"] for each in who],
        "node_count": cluster.node_count(),
        "world_size": cluster.world_size(),
        "groups": len(cluster.get_placement_groups()),
        "address": cluster.get_master_address_and_port()[0],
        "metadata": group.worker_metadata,
    }
    peaceful = group.shutdown() and cluster.shutdown() and cluster.shutdown()
    running = [each["pid"] for each in who if os.path.exists(f"/proc/{each['pid']}")]
    return {**answer, "peaceful": peaceful, "running": running, "all_free": free_cpus()}


def too_few_resources(nodes):
    cluster = reserve([3, 3])
    too_many_nodes = told(cluster.get_placement_groups)
    too_much = told(reserve([2] * 9).get_placement_groups)
    busy = reserve([2, 2, 2])
    busy.get_placement_groups()
    others_have_it = told(reserve([1], ready_timeout=2.0).get_placement_groups)
    busy.shutdown()
    return {"nodes": too_many_nodes, "all": too_much, "busy": others_have_it, "all_free": free_cpus()}


def two_groups_share(nodes):
    cluster = reserve([1, 1], max_colocated_worker_groups=2)
    one, two = group_on(cluster, name_prefix="one"), group_on(cluster, name_prefix="two")
    nodes_of = [[each["node"] for each in ray.get(group.run_all_workers_single_data("who"))] for group in (one, two)]
    third = told(lambda: group_on(cluster))
    free = ray.available_resources().get("CPU", 0)
    one.shutdown()
    again = group_on(cluster, name_prefix="one")
    for group in (again, two):
        group.shutdown()
    cluster.shutdown()
    return {"nodes": nodes_of, "third": third, "free": free}


def a_node_leaves(nodes):
    """The node of a worker (not the head) is lost during a call."""
    cluster = reserve([2, 2])
    sharding = NamedSharding([0, 1], ["data_parallel"])
    group = group_on(cluster, workers_per_node=1, sharding_annotations=sharding)
    who = ray.get(group.run_all_workers_single_data("who"))
    rank, lost = next((rank, node) for rank, of in enumerate(who) for node in nodes if node.node_id == of["node"])
    nodes.remove(lost)
    futures = MultiWorkerFuture(group.run_all_workers_single_data("block"))
    CLUSTER.remove_node(lost, allow_graceful=False)
    error = told(lambda: futures.get_results(group))
    after = told(lambda: group.run_all_workers_single_data("who"))
    running = [each["pid"] for each in who if os.path.exists(f"/proc/{each['pid']}")]
    peaceful = group.shutdown() and cluster.shutdown()
    return {
        "error": error,
        "after": after,
        "running": running,
        "peaceful": peaceful,
        "lost": lost.node_id,
        "rank": rank,
        "groups_left": [each for each in placement_group_table().values() if each["state"] != "REMOVED"],
    }


def configured(workers, **settings):
    deadlines = DeadlinesConfig(start=60.0, call=60.0)
    config = RayGroupConfig(name="ray", num_workers=workers, address=CLUSTER.address, deadlines=deadlines, **settings)
    sharding = NamedSharding(list(range(workers)), ["data_parallel"])
    return ConfiguredRayWorkerGroup(WorkerSpec("probe_workers:Probe", {}), config, sharding=sharding, device="cpu")


def ask(group, method, **kwargs):
    return group.get_all_worker_results(group.run_all_workers_single_data(method, **kwargs))


def placed(**settings):
    """Describe the two workers of a configured group, and what is left of them."""
    free_cpus()
    group = configured(2, **settings)
    who = ask(group, "who")
    answer = {
        "ranks": [[each["node_rank"], each["local_rank"]] for each in who],
        "nodes": [each["node"] for each in who],
        "addresses": [each["address"] for each in who],
        "threads": [each["threads"] for each in who],
        "variables": [[each["environment"].get(name) for name in ("NAMED", "GIVEN", "PLANTED")] for each in who],
        "sum": ask(group, "all_reduce", value=3),
        "ended": group.shutdown(),
        "running": [each["pid"] for each in who if os.path.exists(f"/proc/{each['pid']}")],
    }
    return {**answer, "all_free": free_cpus()}


def configured_groups(nodes):
    os.environ.update(PLANTED="a secret", NAMED="passed on")
    given = {"pass_environment": ("NAMED",), "environment": {"GIVEN": "a value"}}
    return {
        "one_each": placed(workers_per_node=1, **given),
        "packed": placed(),
        "spread": placed(placement="spread"),
        "uneven": told(lambda: configured(3, workers_per_node=2)),
    }


def a_node_falls_silent(nodes):
    """All processes of a worker's node (not the head) stop, so that no connection is closed; before, both were busy."""
    heartbeat.PERIOD, heartbeat.TIMEOUT = 0.2, 0.5
    group = configured(2, workers_per_node=1)
    who = ask(group, "who")
    ask(group, "hold_the_interpreter", seconds=5)  # for longer than silence is tolerated
    rank, lost = next(
        (each["rank"], node) for each in who for node in CLUSTER.worker_nodes if node.node_id == each["node_id"]
    )
    raylet = psutil.Process(lost.all_processes["raylet"][0].process.pid)
    stopped = [raylet, *raylet.children(recursive=True)]
    try:
        for process in stopped:
            process.suspend()
        return {"error": told(lambda: ask(group, "sleep", seconds=600)), "rank": rank}
    finally:
        for process in psutil.wait_procs(stopped, 0)[1]:
            process.resume()


SCENARIOS = (
    configured_groups,
    one_group_a_node,
    too_few_resources,
    two_groups_share,
    a_node_leaves,
    a_node_falls_silent,
)

if __name__ == "__main__":
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
    HEAD = next(ADDRESSES)
    head_args = {"num_cpus": 2, "include_dashboard": False, "node_ip_address": HEAD}
    CLUSTER = Cluster(initialize_head=True, head_node_args=head_args)
    try:
        workers = [add_node() for _ in range(2)]
        ray.init(address=CLUSTER.address, log_to_driver=False, _node_ip_address=HEAD)
        for scenario in SCENARIOS:
            if len(sys.argv) > 1 and scenario.__name__ not in sys.argv[1:]:
                continue
            begun = time.monotonic()
            try:
                result = {"returned": scenario(workers)}
            except Exception:  # noqa: BLE001 - the test shows it
                result = {"traceback": traceback.format_exc()}
            print(json.dumps({"name": scenario.__name__, "seconds": time.monotonic() - begun, **result}), flush=True)
    finally:
        ray.shutdown()
        CLUSTER.shutdown()
