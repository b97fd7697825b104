"""A program with secrets in its environment that starts workers on a private Ray; prints what leaks as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import grpc
import psutil
import ray

sys.path.append(str(Path(__file__).parents[3] / "tests" / "workers"))

from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework_ray import private_ray, runtime
from rlframework_ray.configured_group import ConfiguredRayWorkerGroup
from rlframework_ray.plugin import RayGroupConfig


def processes():
    """This process and its descendants."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def listening():
    found = set()
    for process in processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add(connection.laddr.ip)
    return sorted(found)


def variables():
    """The names of the environment variables of each process but this one, as reported by the system."""
    found = {}
    for process in processes()[1:]:
        try:
            lines = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found[f"{process.name()} {process.pid}"] = [line.decode(errors="replace") for line in lines if line]
    return found


def answers(address):
    """The replies of Ray's node directory to requests without a token, with a wrong one, and with the right one."""
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    def ask(channel, **metadata):
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            told = stub.GetAllNodeInfo(
                gcs_service_pb2.GetAllNodeInfoRequest(), timeout=30, metadata=tuple(metadata.items())
            )
        except grpc.RpcError as error:
            return error.code().name
        return f"{len(told.node_info_list)} node"

    return {
        "none": ask(grpc.insecure_channel(address)),
        "wrong": ask(grpc.insecure_channel(address), authorization="Bearer " + "0" * 64),
        "right": ask(init_grpc_channel(address)),
    }


def main():
    seen = {"before": dict(os.environ)}
    config = RayGroupConfig(name="ray", num_workers=1, pass_environment=("NAMED_TOKEN",))
    group = ConfiguredRayWorkerGroup(
        WorkerSpec("probe_workers:Probe", {}), config, sharding=NamedSharding([0], ["data_parallel"]), device="cpu"
    )
    (who,) = group.get_all_worker_results(group.run_all_workers_single_data("who"))
    seen |= {"worker": who["environment"], "listening": listening(), "variables": variables()}
    seen["token"] = oct((Path.home() / ".ray" / "auth_token").stat().st_mode & 0o777)
    seen["mode"] = os.environ.get("RAY_AUTH_MODE")
    seen["answers"] = answers(ray.get_runtime_context().gcs_address)
    logs = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    secrets = [os.environ[name].encode() for name in ("PLANTED_SECRET", "NAMED_TOKEN")]
    files = [path for path in logs.rglob("*") if path.is_file()]
    seen["logs"] = [str(path) for path in files if any(secret in path.read_bytes() for secret in secrets)]
    seen["files"] = len(files)
    (private,) = runtime._PRIVATE
    folder, watcher = private.folder, private._watcher.pid
    seen["folder"] = [oct(folder.stat().st_mode & 0o777), logs.is_relative_to(folder)]
    known = {process.pid for process in private_ray.processes_of(folder, private.group)}
    seen["unknown"] = [f"{each.name()} {each.pid}" for each in processes()[1:] if each.pid not in known | {watcher}]
    seen["ended"] = group.shutdown()
    seen["folder stays"] = folder.exists()
    until = time.monotonic() + 60
    while len(processes()) > 1 and time.monotonic() < until:
        time.sleep(0.05)
    seen["left"] = [process.name() for process in processes()[1:]]
    seen["still listening"] = listening()
    seen["after"] = dict(os.environ)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
