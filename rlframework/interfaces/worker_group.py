"""The worker-group interface: N worker processes that the driver calls as one.

Names and meaning follow NeMo-RL's `RayWorkerGroup`. Here: workers on one machine or several, sharded and replicated
axes, single calls and shutdown. Not here: groups that share devices, generators (`distributed.worker_groups`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlframework.config.sections import WorkerGroupConfig
    from rlframework.interfaces.named_sharding import NamedSharding


@dataclass(frozen=True)
class WorkerContext:
    """Who a worker is: passed to its constructor as `context`.

    `device` is "cpu" or "cuda"; a worker on a GPU sees that one only, as device 0, whatever its `local_rank`.
    `local_rank` counts the workers of one machine from 0, `node_rank` the machines in the order of ranks; `node` is the
    address of the worker's own machine (empty where there is one only) and `master_addr` one of rank 0's.
    `deadline` is the time in seconds that forming the process group and each collective may take.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    device: str = "cpu"
    deadline: float = 180.0
    threads: int | None = None
    node_rank: int = 0
    node: str = ""


@dataclass(frozen=True)
class WorkerSpec:
    """What to start: an import path `module:Class`, its constructor arguments, and what must be the same on both sides.

    `part` is the kind and name of the plugin part that the worker is: a worker in another process looks it up among
    the plugins that it finds itself, and takes the class from there. `fingerprint` maps plugin name to (distribution,
    version) as the driver sees it; each worker compares it with what it finds itself, and a difference is a
    `PluginError`. `plugins` are the modules that the configuration names.
    """

    target: str
    kwargs: Mapping[str, Any]
    plugins: tuple[str, ...] = ()
    fingerprint: Mapping[str, tuple[str, str]] | None = None
    py_executable: str | None = None
    part: tuple[str, str] | None = None


@dataclass
class MultiWorkerFuture:
    """Results on their way: `futures[i]` belongs to `called_workers[i]`; those of `return_from_workers` are kept.

    `deadline`: seconds that they may take, in place of `deadlines.call`; a group may do without it.
    """

    futures: list[Any]
    return_from_workers: list[int] | None = None
    called_workers: list[int] | None = None
    deadline: float | None = None

    def get_results(self, worker_group: Any, return_generators_as_proxies: bool = False) -> list[Any]:
        """What `worker_group`, which began the calls, says of them: see its `get_all_worker_results`."""
        more = {"return_generators_as_proxies": True} if return_generators_as_proxies else {}
        results: list[Any] = worker_group.get_all_worker_results(self, **more)
        return results


class WorkerGroup(ABC):
    """N workers of one class, called together.

    An implementation starts them in its constructor and returns when all are up, or raises: `DeadlineExceeded` after
    `config.deadlines.start` seconds, saying what it waited for and what was there; `WorkerError` with the rank and the
    traceback of a worker that failed; `UserError` where it cannot have these workers on this machine, such as more
    than there are GPUs. An error of a worker that is itself one of rlframework's comes back as that class, so that a
    mistake of the user is told as such.

    What is wrong with a call itself reaches no worker, and the group goes on: positional arguments, and arguments that
    cannot be sent to another process, are a `TypeError`; shares that are not those of the axis a `BatchError`; an axis
    that is not there a `ValueError`. (Where only one worker's share cannot be sent the group may end instead.)

    A call fails with the first worker that raises, dies or answers what cannot be sent (`WorkerError`, with its rank,
    told at once, whatever the others do; a `WorkerLost` where it died, never where it raised), or with the deadline
    (`DeadlineExceeded`, with the ranks that did not answer). After that the group is unusable: its processes are gone,
    and every call is a `WorkerError`. No process outlives the run, however it ends, and none outlives `shutdown`.

    Workers have processes of their own, and their arguments are their own: a worker may write into them, and nobody
    else sees it. (They need not be copies: memory may be shared until it is written to, so a worker that only reads is
    the faster one, and one that keeps a tensor of a large argument keeps all of it.) A group whose one worker is in the
    driver's process differs: arguments are handed over as they are and must not be changed, its worker's exceptions
    pass through as they are, the group stays usable after one, and deadlines do not apply.
    """

    @abstractmethod
    def __init__(self, spec: WorkerSpec, config: WorkerGroupConfig, *, sharding: NamedSharding, device: str) -> None:
        """Start `sharding.size` workers of `spec.target`, each with `context=WorkerContext(...)`."""

    @property
    @abstractmethod
    def sharding(self) -> NamedSharding:
        """The axes of the group: pipeline_parallel, data_parallel, context_parallel, tensor_parallel."""

    @abstractmethod
    def run_single_worker_single_data(self, method_name: str, worker_idx: int, **kwargs: Any) -> MultiWorkerFuture:
        """Call `method_name` on worker `worker_idx` alone; its result is the only one. No such worker: `IndexError`."""

    @abstractmethod
    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *,
        run_rank_0_only_axes: Sequence[str] | None = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """Call `method_name` with entry i of each of `kwargs` on the i-th worker; `common_kwargs` go to all.

        Each value is a list with one entry for each worker that is called: all, or those at 0 on
        `run_rank_0_only_axes`. Anything else, and no value at all, is a `BatchError`.
        """

    @abstractmethod
    def run_all_workers_single_data(
        self, method_name: str, *, run_rank_0_only_axes: Sequence[str] | None = None, **kwargs: Any
    ) -> MultiWorkerFuture:
        """Call `method_name` on all workers with the same arguments; skip those not at 0 on the named axes."""

    @abstractmethod
    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *,
        in_sharded_axes: Sequence[str] = (),
        replicate_on_axes: Sequence[str] = (),
        output_is_replicated: Sequence[str] = (),
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """Call `method_name` with each worker's share of `kwargs`.

        Each value is a list indexed by the worker's coordinate on the axes of `in_sharded_axes`, in that order;
        `common_kwargs` go to all as they are. An axis that is neither sharded nor replicated is free: only coordinate
        0 is called (the others get None for every argument with `make_dummy_calls_to_free_axes`). Results are kept
        from coordinate 0 of the free axes and of `output_is_replicated`, in the order of worker indices.
        """

    @abstractmethod
    def get_all_worker_results(self, future: MultiWorkerFuture) -> list[Any]:
        """Wait for `future`, at most `deadlines.call` seconds; the kept results in the order of worker indices."""

    @abstractmethod
    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        """Call `cleanup_method` on all, wait at most `timeout` (default `deadlines.shutdown`), then end the workers.

        Idempotent: the clean-up is called once. False, and no exception, when a worker did not end in peace: its
        clean-up raised or took too long, or it was dead.
        """
