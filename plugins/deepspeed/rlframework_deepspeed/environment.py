"""DeepSpeed in a worker's process: which device it takes, its communication, and what it keeps for a whole process.

DeepSpeed chooses its device when it is imported, from an environment variable, and has one communication and one set of
groups a process. Its launcher is not used: the workers are there already, and so is their process group.

Nothing is compiled on a CPU: DeepSpeed's own reduction by shared memory, which it would build on the first run with a
compiler, is left out, and gloo does it instead. What DeepSpeed does compile, where a configuration asks for it (offload
to a disk), is told before it starts.
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
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from rlframework.errors import ConfigError
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.workers import process_groups
from rlframework_deepspeed.checks import COMPILERS

logger = logging.getLogger(__name__)
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
LOCAL_RANK = "LOCAL_RANK"
_before: dict[str, str | None] = {}
"""What the environment had before the first policy of this process."""


def deepspeed_on(device: torch.device) -> Any:
    """The module `deepspeed`, working on `device`; a `ConfigError` where this process has it on another kind."""
    # others may have imported it already, transformers among them; it chooses when it is first asked
    with patch.dict(os.environ, DS_ACCELERATOR=device.type), quiet():
        found = import_module("deepspeed")
        kind = import_module("deepspeed.accelerator").get_accelerator().device_name()
    if kind != device.type:
        raise ConfigError(
            f"DeepSpeed works on {kind} in this process already, and this policy is to be on {device.type}; give one "
            "of them processes of its own (worker_group.name=processes)"
        )
    return found


def join(context: WorkerContext, device: torch.device) -> None:
    """The process group that the workers share, and DeepSpeed's communication over it."""
    process_groups.join(context, device)
    comm: Any = import_module("deepspeed.comm.comm")
    backend = import_module("deepspeed.comm.torch")
    _before.setdefault(LOCAL_RANK, os.environ.get(LOCAL_RANK))
    os.environ[LOCAL_RANK] = "0"  # as its launcher does; a worker sees its own device only
    # with it DeepSpeed would compile for a minute, for a reduction that AutoTP alone uses
    with patch.object(backend, "build_shm_op", lambda: None), quiet():
        comm.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False)
    # DeepSpeed calls them by the names before torch 2.13, which warn
    comm.cdb.all_gather_function, comm.cdb.reduce_scatter_function = all_gather, reduce_scatter


def leave() -> None:
    """Leave the process group; with the last user of it in this process what DeepSpeed keeps of it goes too."""
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
    before = _before.pop(LOCAL_RANK, None)
    os.environ.pop(LOCAL_RANK, None)
    if before is not None:
        os.environ[LOCAL_RANK] = before


@contextmanager
def leaving_on_failure(context: WorkerContext) -> Iterator[None]:
    """Leave where what is within fails, and this rank is alone: others would be waited for, and end by themselves."""
    try:
        yield
    except BaseException:
        if context.world_size == 1:
            leave()
        raise


@contextmanager
def making() -> Iterator[None]:
    """Around DeepSpeed's making of an engine.

    Functions are not compiled: of an optimizer that is not used here (Muon), which would take the whole compiler of
    torch into memory, some seconds in each process.
    """
    with patch.object(torch, "compile", _as_it_is), telling_what_is_compiled(), quiet():
        yield


def _as_it_is(function: Any = None, **_: Any) -> Any:
    return _as_it_is if function is None else function


@contextmanager
def quiet() -> Iterator[None]:
    """Within it, warnings about DeepSpeed's own code, which nobody who uses it can change, are not shown."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"deepspeed\.")
        yield


@contextmanager
def telling_what_is_compiled() -> Iterator[None]:
    """Within it, each extension that DeepSpeed compiles is told before; a `ConfigError` where a compiler is missing.

    It is kept for the next time, for which it is told too, because only the compiler's own tools know.
    """
    builder: Any = import_module("deepspeed.ops.op_builder.builder").OpBuilder
    compiled = builder.jit_load

    def jit_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        _require_compilers(f"DeepSpeed's extension {self.name}")
        logger.warning("DeepSpeed compiles its extension %s on first use: about a minute, once", self.name)
        return compiled(self, *args, **kwargs)

    with patch.object(builder, "jit_load", jit_load):
        yield


def require_compilers(settings: dict[str, Any]) -> None:
    """A `ConfigError` where `settings` will make DeepSpeed compile, before a weight is loaded, and it cannot.

    Only what lies on a disk needs it.
    """
    zero = settings.get("zero_optimization", {})
    places = {zero.get(part, {}).get("device") for part in ("offload_param", "offload_optimizer")}
    if "nvme" in places:
        _require_compilers("offload to a disk (policy.deepspeed.zero_optimization, device: nvme)")


def _require_compilers(what: str) -> None:
    missing = [name for name in COMPILERS if which(name) is None]
    if missing:
        raise ConfigError(
            f"{what} is compiled on first use, and {' and '.join(missing)} cannot be found; install what is missing "
            "(apt-get install g++; pip install ninja), or keep everything in memory"
        )
