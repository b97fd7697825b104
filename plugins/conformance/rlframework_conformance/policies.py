"""Policies for the suites and for parity: a backend on a model in a layout, without the rest of a run.

One worker runs in this process, several run in their own processes (`worker_group.name=processes`, or `ray` if the
backend needs another Python).

Worker processes serve several policies in turn. A process that has run an engine has its modules imported and its
caches filled, so the next policy starts in a fraction of the time. A group that shuts down without failure returns its
processes; after any failure they are ended. One idle set is kept, for one backend in one layout, and each process
serves a limited number of policies, because libraries accumulate state.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.generation.remote import RemoteGeneration
from rlframework.interfaces.worker_group import WorkerGroup, WorkerSpec
from rlframework.plugins.configure import load_config
from rlframework.policy.client import Policy
from rlframework.workers.processes import Peer, ProcessWorkerGroup
from rlframework.workers.temporary import TemporaryFolder
from rlframework_conformance.layouts import Layout

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.config.sections import RunConfig
    from rlframework.plugins.manager import PluginManager

_MAX_USES = 30


@dataclass
class _Idle:
    """Idle processes by rank, for a policy like the previous ones."""

    like: tuple[Any, ...] = ()
    environments: dict[int, dict[str, str]] = field(default_factory=dict)
    peers: dict[int, Peer] = field(default_factory=dict)
    uses: int = 0


_idle = _Idle()


def end_idle() -> None:
    """End the idle processes."""
    global _idle
    old, _idle = _idle, _Idle()
    for peer in old.peers.values():
        peer.kill()
    for peer in old.peers.values():
        peer.close()


atexit.register(
    end_idle
)  # registered after multiprocessing's handler, which waits for its children, so that it runs first


class _SharedFolder(TemporaryFolder):
    """A folder for temporary files that groups share, because a process that serves several keeps its TMPDIR."""

    def remove(self) -> None:
        """Leave the folder: it is removed at exit."""


@cache
def _shared_folder(parent: str | None) -> _SharedFolder:
    folder = _SharedFolder(parent)
    atexit.register(TemporaryFolder.remove, folder)
    return folder


class WarmWorkerGroup(ProcessWorkerGroup):
    """Reuses idle processes that served policies of the same backend and layout, and returns its own."""

    def _temporary_folder(self, parent: str | None) -> TemporaryFolder:
        return _shared_folder(parent)

    def _start_hosts(self, spec: WorkerSpec, device: str) -> None:
        self._like = (spec.kwargs.get("inner", spec.target), device, str(self._sharding), os.getcwd())
        self._environments: dict[int, dict[str, str]] = {}
        self._uses = 0
        super()._start_hosts(spec, device)

    def _peer(self, rank: int, method: Any, environment: dict[str, str]) -> Peer:
        self._environments[rank] = environment
        if rank == 0 and not self._fits(environment):
            end_idle()
        if rank not in _idle.peers:
            return super()._peer(rank, method, environment)
        self._uses = _idle.uses
        return _idle.peers.pop(rank)

    def _fits(self, environment: dict[str, str]) -> bool:
        return self._like == _idle.like and environment == _idle.environments[0] and _idle.uses < _MAX_USES

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        """See `WorkerGroup`; processes that completed `cleanup_method` are kept."""
        running = self._ended is None and cleanup_method is not None
        peaceful = self._clean_up(cleanup_method, timeout)
        if running and peaceful:
            self._give_back()
        return self._end("it was shut down") and peaceful

    def _give_back(self) -> None:
        global _idle
        refs = {rank: self._send(rank, "forget") for rank in range(len(self._peers))}
        self._wait(refs, "forgetting a worker", "shutdown", self._deadlines.shutdown)
        end_idle()  # not those of this group, which were removed before
        peers, self._peers, self._pids = dict(enumerate(self._peers)), [], {}
        _idle = _Idle(self._like, self._environments, peers, self._uses + 1)


DEFAULTS: Mapping[str, Any] = {
    "train_global_batch_size": 8,
    "train_micro_batch_size": 3,
    "logprob_batch_size": 3,
    "optimizer": {"lr": 1e-4},
    "batching": {"mode": "padded"},
    "precision": "float32",
    "tf32": False,
}
"""Default keys of `policy`. Three rows per microbatch do not divide a batch, so the last microbatch is partial.

Contracts are checked in fp32, on a GPU too, where bfloat16 and TF32 are a run's defaults.
"""

DEADLINES = {"start": 120.0, "call": 120.0, "shutdown": 20.0}
"""Seconds; tiny models need about one, so that a hang is reported soon."""

GPU_DEADLINES = {"start": 300.0, "call": 300.0, "shutdown": 20.0}
"""The same on a GPU, where each process compiles kernels before its first results."""


def run_config(
    backend: str,
    model: Path | str,
    layout: Layout,
    *,
    manager: PluginManager,
    device: str = "cpu",
    folder: Path = Path("unused"),
    generation: Mapping[str, Any] | None = None,
    deadlines: Mapping[str, float] | None = None,
    num_workers: int | None = None,
    apart: bool = False,
    **keys: Any,
) -> RunConfig:
    """Return a validated configuration with `keys` of the section `policy` over `DEFAULTS`; only its policy is used.

    `num_workers` overrides the workers of `layout`. `apart` puts even a single worker into a separate process.
    """
    workers = num_workers or layout.workers
    group = "inline" if workers == 1 and not apart else "processes"
    if manager.select("policy_worker", backend).record.py_executable is not None:
        group = "ray"  # the only group that can give a worker another Python
    source: dict[str, Any] = {
        "output_dir": str(folder / "unused"),
        "device": device,
        "algorithm": {"name": "sft"},
        "environment": {"name": "addition"},
        "generation": dict(generation or {}),
        "policy": {
            **DEFAULTS,
            "model_name": str(model),
            "backend": backend,
            "parallelism": layout.parallelism,
            **keys,
        },
        "worker_group": {
            "name": group,
            "num_workers": workers,
            "deadlines": dict(deadlines or (GPU_DEADLINES if device == "cuda" else DEADLINES)),
        },
    }
    return load_config(source, manager=manager)


class InspectedPolicy(Policy):
    """A policy whose workers can be inspected and may be mutants.

    `mutant` is a name in `mutants.policy_worker`.
    """

    def __init__(self, *args: Any, mutant: str | None = None, **kwargs: Any) -> None:
        self._mutant = mutant
        super().__init__(*args, **kwargs)

    def _choose_group_class(self, chosen: type[WorkerGroup]) -> type[WorkerGroup]:
        """Reuse processes for several policies, except for mutants, which may leave anything behind."""
        return WarmWorkerGroup if chosen is ProcessWorkerGroup and self._mutant is None else chosen

    def _wrap_spec(self, spec: WorkerSpec) -> WorkerSpec:
        """Wrap each worker in an `Inspected`."""
        return replace(
            spec,
            target="rlframework_conformance.inspected_worker:Inspected",
            kwargs={**spec.kwargs, "inner": spec.target, "mutant": self._mutant},
            part=None,
            fingerprint=None,
        )

    def everywhere(self, method: str, **kwargs: Any) -> list[Any]:
        """Return the result of the worker's `method` on each rank."""
        group = self.worker_group
        return group.get_all_worker_results(group.run_all_workers_single_data(method, **kwargs))

    def inspect(self, function: str, **kwargs: Any) -> list[Any]:
        """Return the result of `module:function`, called with the worker, on each rank."""
        return self.everywhere("inspect", function=function, arguments=kwargs)


class InspectedEngines(RemoteGeneration):
    """Generation workers in separate processes that can be inspected."""

    worker = "rlframework_conformance.inspected_worker:InspectedReceiver"

    def everywhere(self, method: str, /, **kwargs: Any) -> list[Any]:
        """Return the result of the worker's `method` of each engine."""
        started = [(engine, engine.start(method, **kwargs)) for engine in self.client.engines]
        return [result for engine, future in started for result in engine.results(future)]

    def inspect(self, function: str, **kwargs: Any) -> list[Any]:
        """Return the result of `module:function`, called with the worker, of each engine."""
        return self.everywhere("inspect", function=function, arguments=kwargs)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in the safetensors files of a Hugging Face directory, by name."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def weights_of(policy: Policy, folder: Path) -> dict[str, Tensor]:
    """Return the weights of `policy` as `save_pretrained` writes them; `folder` is replaced."""
    policy.save_pretrained(str(folder))
    return read_weights(folder)
