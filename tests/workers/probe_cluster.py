"""A program that runs worker groups on a local Ray cluster of a head and two nodes; prints its observations as JSON.

It is a program of its own because the other tests share a different Ray, and a process can only connect to one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
os.environ["NRL_VIRTUAL_CLUSTER_MAX_RETRIES"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from rlframework.config.sections import DeadlinesConfig, RayGroupConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers.ray.remote_group import RayRemoteWorkerGroup


def start(cluster, workers, **settings):
    deadlines = DeadlinesConfig(call=settings.pop("call", 90.0), start=60.0)
    config = RayGroupConfig(name="ray", num_workers=workers, address=cluster.address, deadlines=deadlines, **settings)
    spec = WorkerSpec("probe_workers:Probe", {})
    return RayRemoteWorkerGroup(
        spec, config, sharding=NamedSharding(list(range(workers)), ["data_parallel"]), device="cpu"
    )


def ask(group, method, **kwargs):
    return group.get_all_worker_results(group.run_all_workers_single_data(method, **kwargs))


def alive(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def failure(call):
    begun = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the error is the result
        return {"class": type(error).__name__, "message": str(error), "seconds": time.monotonic() - begun}
    return None


def places(cluster, **settings):
    group = start(cluster, 2, **settings)
    told = ask(group, "who")
    summed = ask(group, "all_reduce", value=3)
    told = [
        {key: answer[key] for key in ("node_rank", "local_rank", "node", "address", "threads")}
        | {"passed": answer["environment"].get("NAMED"), "secret": "PLANTED" in str(answer["environment"])}
        | {"given": answer["environment"].get("GIVEN"), "pid": answer["pid"]}
        for answer in told
    ]
    ended = group.shutdown()
    groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"] if ray.is_initialized() else []
    return {"told": told, "sum": summed, "ended": ended, "left": alive([t["pid"] for t in told]), "groups": len(groups)}


def killed_elsewhere(cluster):
    group = start(cluster, 2, workers_per_node=1)
    pids = [answer["pid"] for answer in ask(group, "who")]
    return failure(lambda: ask(group, "die", only=1)) | {"left": alive(pids), "ended": group.shutdown()}


def lost_node(cluster, node):
    group = start(cluster, 2, workers_per_node=1)
    told = ask(group, "who")
    rank = next(a["rank"] for a in told if a["node_id"] == node.node_id)
    pids = [answer["pid"] for answer in told]
    threading.Timer(1.0, lambda: cluster.remove_node(node, allow_graceful=False)).start()
    found = failure(lambda: ask(group, "sleep", seconds=80))
    begun = time.monotonic()
    ended = group.shutdown()
    return found | {"rank": rank, "left": alive(pids), "ended": ended, "shutdown": time.monotonic() - begun}


def main():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)  # stays connected between the groups
    os.environ["PLANTED"] = "a secret"
    os.environ["NAMED"] = "passed on"
    seen = {}

    def note(name, call):
        until = time.monotonic() + 10
        while ray.available_resources().get("CPU", 0) < 4 and time.monotonic() < until:
            time.sleep(0.05)  # nodes report released resources with a delay
        begun = time.monotonic()
        seen[name] = call()
        print(name, f"{time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)

    given = {"pass_environment": ("NAMED",), "environment": {"GIVEN": "a value"}}
    note("one_each", lambda: places(cluster, workers_per_node=1, **given))
    note("packed", lambda: places(cluster))
    note("spread", lambda: places(cluster, placement="spread"))
    note("too_many", lambda: failure(lambda: start(cluster, 5)))
    note("uneven", lambda: failure(lambda: start(cluster, 3, workers_per_node=2)))
    note("killed", lambda: killed_elsewhere(cluster))
    note("lost", lambda: lost_node(cluster, nodes[1]))
    until = time.monotonic() + 10
    while (free := ray.available_resources().get("CPU")) != 2 and time.monotonic() < until:
        time.sleep(0.05)
    seen["free"] = free
    print(json.dumps(seen))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
