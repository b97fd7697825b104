"""DeepSpeed's per-process state: its device, its communication backend, and its cleanup.

DeepSpeed chooses its device on import, from an environment variable, and has one communication backend and one set of
groups per process. Its launcher is not used: the workers and their process group already exist.

Nothing is compiled on a CPU: gloo replaces DeepSpeed's shared-memory reduction, which would be compiled on first use.
Extensions that a configuration requires (offload to a disk) are logged before DeepSpeed compiles them.

Replaced attributes, because DeepSpeed has no option for them:

    torch.compile                        building the engine: used only for Muon, loads torch's compiler for seconds
    comm.torch.build_shm_op              joining: would compile for a minute, for a reduction that AutoTP alone uses
    OpBuilder.jit_load                   building the engine: to check the compilers and log before it compiles
    engine._apply_autotp_partitioning    building the engine: to partition adapters with their layers (`autotp`)
    the optimizer's norm, has_overflow   stepping: to clip by the finite norm over all shards (`gradient_norm`)
    adam.state                           saving: to leave the moments out of DeepSpeed's files (`zero_checkpoint`)
    zero_to_fp32                         loading: to read one tensor-parallel rank's files, silently (`zero_checkpoint`)
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from shutil import which
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlframework.base.errors import ConfigError
from rlframework.engine import WorkerContext, process_groups, replacing
from rlframework_deepspeed.config_checks import COMPILERS

logger = logging.getLogger(__name__)
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
LOCAL_RANK = "LOCAL_RANK"
_before: dict[str, str | None] = {}
"""The environment before the first policy of this process."""


def deepspeed_on(device: torch.device) -> Any:
    """Import `deepspeed` for `device`; raise `ConfigError` if this process already uses it on another device type."""
    # transformers and others may have imported it already; it chooses on first use
    with _environment(DS_ACCELERATOR=device.type), quiet():
        found = import_module("deepspeed")
        kind = import_module("deepspeed.accelerator").get_accelerator().device_name()
    if kind != device.type:
        raise ConfigError(
            f"DeepSpeed already uses {kind} in this process, but this policy needs {device.type}; run one of them in "
            "its own processes (worker_group.name=processes)"
        )
    return found


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            _restore(name, value)


def _restore(variable: str, value: str | None) -> None:
    os.environ.pop(variable, None)
    if value is not None:
        os.environ[variable] = value


def join(context: WorkerContext, device: torch.device) -> None:
    """Join the workers' process group and initialise DeepSpeed's communication over it."""
    process_groups.join(context, device)
    comm: Any = import_module("deepspeed.comm.comm")
    backend = import_module("deepspeed.comm.torch")
    _before.setdefault(LOCAL_RANK, os.environ.get(LOCAL_RANK))
    os.environ[LOCAL_RANK] = "0"  # as its launcher does; a worker sees its own device only
    with replacing(backend, build_shm_op=lambda: None), quiet():
        comm.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False)
    # DeepSpeed calls them by the names before torch 2.13, which warn
    comm.cdb.all_gather_function, comm.cdb.reduce_scatter_function = all_gather, reduce_scatter


def leave() -> None:
    """Leave the process group; the last user in this process also clears DeepSpeed's global state."""
    process_groups.leave()
    if dist.is_initialized():
        return
    import_module("deepspeed.utils.groups")._release_process_group_references(None)
    comm: Any = import_module("deepspeed.comm.comm")
    comm.cdb = None
    init: Any = import_module("deepspeed.runtime.zero.partition_parameters").Init
    init.num_persisted_parameters = init.num_persisted_elements = 0
    init.apply_param_persistence = False
    if hasattr(init, "linear_bk"):  # ZeRO-3 puts a function of its own in place of torch's, and leaves it there
        nn.functional.linear = init.linear_bk
    _restore(LOCAL_RANK, _before.pop(LOCAL_RANK, None))


@contextmanager
def leaving_on_failure(context: WorkerContext) -> Iterator[None]:
    """Leave the process group on failure if this is the only rank; several ranks would wait for each other."""
    try:
        yield
    except BaseException:
        if context.world_size == 1:
            leave()
        raise


@contextmanager
def building_engine() -> Iterator[None]:
    """The context for creating a DeepSpeed engine."""
    with replacing(torch, compile=_identity), announcing_compilation(), quiet():
        yield


def _identity(function: Any = None, **_: Any) -> Any:
    return _identity if function is None else function


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings about DeepSpeed's own code, which callers cannot fix."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"deepspeed\.")
        yield


@contextmanager
def announcing_compilation() -> Iterator[None]:
    """Log each extension before DeepSpeed compiles it; raise `ConfigError` if a compiler is missing.

    Cached extensions are logged too, because only the build tools know whether they are up to date.
    """
    builder: Any = import_module("deepspeed.ops.op_builder.builder").OpBuilder
    compiled = builder.jit_load

    def jit_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        _require_compilers(f"DeepSpeed's extension {self.name}")
        logger.warning("DeepSpeed compiles its extension %s on first use: about a minute, once", self.name)
        return compiled(self, *args, **kwargs)

    with replacing(builder, jit_load=jit_load):
        yield


def require_compilers(settings: dict[str, Any]) -> None:
    """Raise `ConfigError`, before any weight is loaded, if `settings` (offload to a disk) need a missing compiler."""
    zero = settings.get("zero_optimization", {})
    places = {zero.get(part, {}).get("device") for part in ("offload_param", "offload_optimizer")}
    if "nvme" in places:
        _require_compilers("offload to a disk (policy.deepspeed.zero_optimization, device: nvme)")


def _require_compilers(what: str) -> None:
    missing = [name for name in COMPILERS if which(name) is None]
    if missing:
        raise ConfigError(
            f"{what} is compiled on first use, but {' and '.join(missing)} cannot be found; install what is missing "
            "(apt-get install g++; pip install ninja), or keep everything in memory"
        )
