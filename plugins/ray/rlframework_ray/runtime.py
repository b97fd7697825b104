"""The Ray connection that this process's worker groups share: found or started on first use, ended by its starter."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlframework.base.errors import ConfigError, RunTerminated, WriteError
from rlframework.workers.machine import cpu_count, inherited_environment
from rlframework_ray.private_ray import PrivateRay

_OWNED_BY: set[int] = set()
"""Users (groups and clusters, by id) of a Ray connection that this module opened; it ends with the last of them."""
_PRIVATE: list[PrivateRay] = []
"""Not empty if the running Ray is private to this process."""

_NO_LOG_MONITOR = {"RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0", "LOG_NAME_UPDATE_INTERVAL_S": "86400"}
"""Without these, Ray looks for new lines ten times a second; `log_tail` reads a private Ray's logs from their files."""
_RAY_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD", "VIRTUAL_ENV", *_NO_LOG_MONITOR)
_RAY_PREFIXES = ("RAY_", "NVIDIA_")
"""Variables that Ray's own processes inherit, besides `machine.INHERITED`; Ray's workers inherit them in turn."""
_ENABLE_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, Ray starts a cluster that no other machine can join: it keeps a loopback address and listens only there.
Otherwise it replaces loopback by the machine's own address, and listens at all addresses."""
_LOOPBACK = "127.0.0.1"
_TAIL_WAIT = 3.0
_RAY_LOG_MARKERS = (":job_id:", ":actor_name:", ":task_name:")


def is_private(address: str | None = None) -> bool:
    """Whether `acquire` has started, or would start, a Ray that is private to this process and machine."""
    return bool(_PRIVATE) if ray.is_initialized() else (address or os.environ.get("RAY_ADDRESS") or "local") == "local"


def acquire(user: int, address: str | None = None, listen: str = _LOOPBACK, log_dir: Path | None = None) -> None:
    """Connect to Ray: keep an existing connection, else use `address` or RAY_ADDRESS, else start a private Ray.

    A private Ray listens at the address `listen`, and its processes inherit only the environment variables that they
    need; `log_dir` is where its logs stay. Raises `ConfigError` if there is no Ray cluster at the address. `user` is
    the id to pass to `release`. An interrupt ends what was started, and is raised by the caller's own signal handler.
    """
    if ray.is_initialized():
        if _OWNED_BY:
            _OWNED_BY.add(user)
        return
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    # Ray runs workers at niceness 15, where another busy program on the same cores would almost starve them
    settings["RAY_worker_niceness"] = "0"
    with _environment(settings), _own_signal_handlers():
        if is_private(address):
            _start_private(listen, log_dir)
        else:
            _connect(address or os.environ["RAY_ADDRESS"])
    logging.getLogger("ray").setLevel(logging.WARNING)  # silenced only during startup
    _OWNED_BY.add(user)


def _start_private(listen: str, log_dir: Path | None) -> None:
    settings = _NO_LOG_MONITOR | ({_ENABLE_CLUSTER: "0"} if listen == _LOOPBACK else {})
    try:
        private = PrivateRay(log_dir)
    except (OSError, WriteError) as error:
        raise ConfigError(f"no folder can be created for the Ray that the run starts: {error}") from error
    _PRIVATE.append(private)
    try:
        with _environment(settings), _isolated_startup(private, loopback=listen == _LOOPBACK):
            ray.init(
                address="local",
                num_cpus=cpu_count(),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=listen,
                _temp_dir=str(private.temp_dir),
            )
    except BaseException:
        _disconnect()
        raise


def _connect(address: str) -> None:
    if address.startswith("ray://"):
        raise ConfigError(
            f"{address}: a Ray client cannot start worker groups; run on a machine of the cluster (`ray job submit`)"
        )
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster was found at {address}: {error}; start one (`ray start --head`), correct "
            "worker_group.address or RAY_ADDRESS, or unset both"
        ) from error


def release(user: int) -> None:
    """Unregister `user`. After the last one, shut down the private Ray, or disconnect from the cluster."""
    if user not in _OWNED_BY:
        return
    _OWNED_BY.remove(user)
    if not _OWNED_BY:
        _disconnect()


def _disconnect() -> None:
    try:
        ray.shutdown()
    finally:
        while _PRIVATE:
            _PRIVATE.pop().end()


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep this process's handling of SIGTERM, which `ray.init` replaces in two ways: by a Python handler that raises
    `SystemExit`, and by one in C++ that aborts the process.

    A SIGTERM that Ray's handler has caught meanwhile is raised again, for the handler of this process.
    """
    disabled, before = ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER, signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    try:
        yield
    except SystemExit as error:
        if not is_main or error.code != signal.SIGTERM:
            raise
        signal.signal(signal.SIGTERM, before)
        signal.raise_signal(signal.SIGTERM)
        raise RunTerminated from error  # by a handler that returned
    finally:
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = disabled
        if is_main:
            signal.signal(signal.SIGTERM, before)


def log_tail(pid: int, lines: int = 20) -> str:
    """The last lines that the worker process `pid` wrote to standard error; empty if Ray has no log of it."""
    node = ray._private.worker.global_worker.node
    logs = [] if node is None else Path(node.get_logs_dir_path()).glob(f"worker-*-{pid}.err")
    written = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    text = "\n".join([line for line in written if not line.startswith(_RAY_LOG_MARKERS)][-lines:])
    return f"\nthe end of its standard error:\n{text}" if text.strip() else ""


def log_tail_of(node_id: str, pid: int) -> str:
    """`log_tail` of a process on another node; empty if that node is gone or does not reply in time."""
    on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(log_tail).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
    try:
        return str(ray.get(task.remote(pid), timeout=_TAIL_WAIT))
    except (ray.exceptions.RayError, TimeoutError):
        return ""


def is_dead(actor: Any) -> bool:
    """Whether Ray has noticed that the process of `actor` has ended."""
    found = ray._private.state.actors(actor._actor_id.hex())
    return not found or found.get("State") == "DEAD"


def addresses_of(actors: Sequence[Any]) -> dict[int, tuple[str, int]]:
    """The address and port at which the process of each of `actors` accepts calls, by index; without dead ones."""
    found = [ray._private.state.actors(actor._actor_id.hex()) for actor in actors]
    known = {index: actor["Address"] for index, actor in enumerate(found) if actor}
    return {index: (address["IPAddress"], address["Port"]) for index, address in known.items() if address["Port"]}


def poll(items: Sequence[Any], is_done: Callable[[Any], bool], seconds: float) -> bool:
    """Wait until `is_done` holds for each of `items`; return whether it does within `seconds`."""
    until, left = time.monotonic() + seconds, list(items)
    while left and time.monotonic() < until:
        left = [item for item in left if not is_done(item)]
        time.sleep(0.02 if left else 0)
    return not left


class _FilteredOs:
    """Replaces the module `os` while Ray starts its processes, so that they inherit only named variables and `more`.

    Leaves the environment of this process alone, because other threads may be reading it.
    """

    def __init__(self, more: dict[str, str]) -> None:
        self._more = more

    def __getattr__(self, name: str) -> Any:
        if name == "environ":
            return {**inherited_environment(_RAY_VARIABLES, _RAY_PREFIXES), **self._more}
        return getattr(os, name)


@contextmanager
def _isolated_startup(private: PrivateRay, *, loopback: bool) -> Iterator[None]:
    """Start Ray's processes with `_FilteredOs.environ`, and with `loopback` closed to other machines.

    They are in another process group: a signal to the driver's, as from a terminal or a scheduler, must not end them
    before the run has saved a checkpoint.
    """
    popen, enable_cluster = services.ConsolePopen, ray_constants.ENABLE_RAY_CLUSTER
    token = Path.home() / ".ray" / "auth_token"
    had_token = token.exists()
    services_module: Any = services
    services_module.os = _FilteredOs(private.environment)
    services_module.ConsolePopen = partial(popen, process_group=private.group)
    ray_constants.ENABLE_RAY_CLUSTER = enable_cluster and not loopback
    try:
        yield
    finally:
        services_module.os = os
        services_module.ConsolePopen = popen
        ray_constants.ENABLE_RAY_CLUSTER = enable_cluster
        if token.exists() and not had_token:  # Ray leaves it readable by all users of the machine
            token.chmod(0o600)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables that are not set yet while the body runs."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
