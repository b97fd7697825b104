"""One local Ray for the worker groups of this process: started when first needed, ended by who started it."""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlframework.errors import ConfigError

_OWNED_BY: set[int] = set()
"""Groups that use a Ray which this module started; it ends with the last of them."""

PASSED_ON = ("RLFRAMEWORK_DISABLE_PLUGINS", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""Environment variables that workers get from the driver, besides those that `worker_environment` makes."""


def cpu_count() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_cores(workers: int) -> None:
    """A `ConfigError` when there are more workers than cores."""
    cores = cpu_count()
    if workers > cores:
        raise ConfigError(
            f"worker_group.num_workers={workers}, but this process may use {cores} CPU core(s): set at most {cores}"
        )


def check_gpus(workers: int) -> None:
    """A `ConfigError` when Ray, which must be up, has fewer GPUs than workers."""
    import ray

    gpus = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
    if workers > gpus:
        raise ConfigError(
            f"worker_group.num_workers={workers} on device cuda, but there are {gpus} GPU(s): set at most "
            f"{gpus}, make more visible in CUDA_VISIBLE_DEVICES, or set device=cpu"
        )


def acquire(user: int) -> None:
    """Have a Ray: the one that this process is connected to, the one at RAY_ADDRESS, or a private one, started here."""
    import ray

    if ray.is_initialized():
        if _OWNED_BY:
            _OWNED_BY.add(user)
        return
    attach = bool(os.environ.get("RAY_ADDRESS"))
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    # Ray runs workers at niceness 15: beside another busy program on the same cores they would all but stand still
    settings["RAY_worker_niceness"] = "0"
    with _environment(settings):
        if attach:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(
                address="local",
                num_cpus=cpu_count(),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
            )
    logging.getLogger("ray").setLevel(logging.WARNING)  # quiet at the start only
    _OWNED_BY.add(user)


def release(user: int) -> None:
    """`user` needs Ray no longer; the last one ends (or leaves) the Ray that was started here."""
    if user not in _OWNED_BY:
        return
    _OWNED_BY.remove(user)
    if not _OWNED_BY:
        import ray

        ray.shutdown()


def worker_environment(workers: int) -> dict[str, str]:
    """The environment variables of a worker on this machine, by name: nothing else is copied."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    passed.setdefault("RLFRAMEWORK_DISABLE_PLUGINS", "")
    passed["OMP_NUM_THREADS"] = str(threads_per_worker(workers))
    passed["PYTHONPATH"] = os.pathsep.join(import_path())
    if sys.platform == "linux":  # all workers are on this machine: no port of theirs is open to others
        passed["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return passed


def threads_per_worker(workers: int) -> int:
    """OMP_NUM_THREADS where the user set it; otherwise an equal share of the cores, at least one."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(asked) if asked.isdigit() else cpu_count() // workers)


def import_path() -> list[str]:
    """The driver's `sys.path` without the packages that a Python has installed: workers find the same sources."""
    standard = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    entries = dict.fromkeys(Path(entry or ".").resolve() for entry in sys.path)
    return [
        str(entry)
        for entry in entries
        if entry.is_dir()
        and entry.name not in ("site-packages", "dist-packages")
        and not standard.intersection((entry, *entry.parents))
    ]


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
    text = "\n".join(found[-1].read_text(errors="replace").splitlines()[-lines:])
    return f"\nits last words on standard error:\n{text}" if text.strip() else ""


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
