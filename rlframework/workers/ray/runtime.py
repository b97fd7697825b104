"""One Ray for the worker groups of this process: found or started when first needed, ended by who started it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlframework.errors import ConfigError
from rlframework.workers.machine import cpu_count, kept_environment

_OWNED_BY: set[int] = set()
"""Groups that use a Ray which this module started; it ends with the last of them."""
_PRIVATE: list[bool] = []
"""Not empty: the Ray that is up is this process's own."""

_UNREAD_LOGS = {"RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0", "LOG_NAME_UPDATE_INTERVAL_S": "86400"}
"""A private Ray's logs are read where they lie (`log_tail`), so it need not look for new lines ten times a second."""
_NEEDED = ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD", "VIRTUAL_ENV", *_UNREAD_LOGS)
_NEEDED_BEGINNINGS = ("RAY_", "NVIDIA_")
"""What Ray's own processes get of this one's environment, besides `machine.KEPT`; their workers inherit it."""
_MAY_JOIN = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, Ray makes a cluster that no other machine can join: it leaves a loopback address as it is, and listens there.
Otherwise it takes the machine's own address instead, and listens at all of them."""
_LOOPBACK = "127.0.0.1"
_TAIL_WAIT = 3.0
_RAYS_OWN_LINES = (":job_id:", ":actor_name:", ":task_name:")


def check_gpus(workers: int) -> None:
    """A `ConfigError` when Ray, which must be up, has fewer GPUs than workers."""
    import ray

    gpus = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
    if workers > gpus:
        raise ConfigError(
            f"worker_group.num_workers={workers} on device cuda, but there are {gpus} GPU(s): set at most "
            f"{gpus}, make more visible in CUDA_VISIBLE_DEVICES, or set device=cpu"
        )


def would_be_private(address: str | None = None) -> bool:
    """Whether `acquire` would give, or gave, a Ray of this process's own, on this machine alone."""
    import ray

    return bool(_PRIVATE) if ray.is_initialized() else (address or os.environ.get("RAY_ADDRESS") or "local") == "local"


def is_private() -> bool:
    """Whether the Ray that is up was started here, for this process alone."""
    return bool(_PRIVATE)


def acquire(user: int, address: str | None = None, listen: str = "127.0.0.1") -> None:
    """Have a Ray: the one that this process is connected to, the one at `address` or RAY_ADDRESS, or a private one.

    A private one is started here, listens at the address `listen`, and its processes get of the environment of this
    one what they need and nothing else. A `ConfigError` where there is none at the address.
    """
    import ray

    if ray.is_initialized():
        if _OWNED_BY:
            _OWNED_BY.add(user)
        return
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    # Ray runs workers at niceness 15: beside another busy program on the same cores they would all but stand still
    settings["RAY_worker_niceness"] = "0"
    private = would_be_private(address)
    if private:
        settings |= _UNREAD_LOGS
    if private and listen == _LOOPBACK:
        settings[_MAY_JOIN] = "0"
    with _environment(settings):
        if private:
            with _started_by_us(loopback=listen == _LOOPBACK):
                ray.init(
                    address="local",
                    num_cpus=cpu_count(),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address=listen,
                )
            _PRIVATE.append(True)
        else:
            _connect(address or os.environ["RAY_ADDRESS"])
    logging.getLogger("ray").setLevel(logging.WARNING)  # quiet at the start only
    _OWNED_BY.add(user)


def _connect(address: str) -> None:
    import ray

    hint = "start one (`ray start --head`), correct worker_group.address or RAY_ADDRESS, or leave them out"
    if address.startswith("ray://"):
        raise ConfigError(
            f"{address}: a Ray client cannot hold workers; run on a machine of the cluster (`ray job submit`)"
        )
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no Ray cluster was found at {address}: {error}; {hint}") from error


def release(user: int) -> None:
    """`user` needs Ray no longer; the last one ends (or leaves) the Ray that was started here."""
    if user not in _OWNED_BY:
        return
    _OWNED_BY.remove(user)
    if not _OWNED_BY:
        import ray

        ray.shutdown()
        _PRIVATE.clear()


def log_tail(pid: int, lines: int = 20) -> str:
    """The end of what the worker process `pid` wrote to its standard error; empty when Ray kept none."""
    import ray

    node = ray._private.worker.global_worker.node
    if node is None:
        return ""
    logs = Path(node.get_logs_dir_path())
    found = sorted(logs.glob(f"worker-*-{pid}.err"))
    if not found:
        return ""
    written = found[-1].read_text(errors="replace").splitlines()
    text = "\n".join([line for line in written if not line.startswith(_RAYS_OWN_LINES)][-lines:])
    return f"\nits last words on standard error:\n{text}" if text.strip() else ""


def log_tail_of(node_id: str, pid: int) -> str:
    """`log_tail` of a process on another node; empty where that node is gone or does not say in time."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(log_tail).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    try:
        return str(ray.get(task.remote(pid), timeout=_TAIL_WAIT))
    except (ray.exceptions.RayError, TimeoutError):
        return ""


def is_dead(actor: Any) -> bool:
    """Whether Ray knows that the process of `actor` has ended."""
    import ray

    found = ray._private.state.actors(actor._actor_id.hex())
    return not found or found.get("State") == "DEAD"


def cores_and_names() -> tuple[dict[str, int], dict[str, str]]:
    """CPUs and host names of the living nodes, by their ids."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    cores = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in nodes}
    return cores, {node["NodeID"]: node["NodeManagerHostname"] for node in nodes}


class _Os:
    """Stands for the module `os` where Ray starts its processes: they inherit what is named, and nothing else.

    The environment of this process is not touched, which other threads may be reading.
    """

    @property
    def environ(self) -> dict[str, str]:
        """What is inherited."""
        return kept_environment(_NEEDED, _NEEDED_BEGINNINGS)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@contextmanager
def _started_by_us(*, loopback: bool) -> Iterator[None]:
    """Processes that Ray starts meanwhile get `_Os.environ`, and with `loopback` see `_MAY_JOIN`."""
    from ray._private import ray_constants, services

    may_join, token = ray_constants.ENABLE_RAY_CLUSTER, Path.home() / ".ray" / "auth_token"
    had_token = token.exists()
    services_module: Any = services
    services_module.os = _Os()
    ray_constants.ENABLE_RAY_CLUSTER = may_join and not loopback
    try:
        yield
    finally:
        services_module.os = os
        ray_constants.ENABLE_RAY_CLUSTER = may_join
        if token.exists() and not had_token:  # Ray lets all users of the machine read it
            token.chmod(0o600)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables that are not set, for as long as the body runs."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
