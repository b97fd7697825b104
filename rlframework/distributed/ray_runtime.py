"""One local Ray for the worker groups of this process: started when first needed, ended by who started it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlframework.distributed.machine import cpu_count
from rlframework.errors import ConfigError

_OWNED_BY: set[int] = set()
"""Groups that use a Ray which this module started; it ends with the last of them."""


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
