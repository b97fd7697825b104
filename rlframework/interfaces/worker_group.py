"""The worker-group interface: N worker processes that the driver calls as one.

Names and semantics follow NeMo-RL's `RayWorkerGroup`. Covers workers on one or several machines, sharded and replicated
axes, calls to a single worker, and shutdown. Does not cover groups that share devices, or generators: see
`rlframework_ray`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rlframework.config.sections import WorkerGroupConfig
    from rlframework.interfaces.named_sharding import NamedSharding

F = TypeVar("F", bound=Callable[..., Any])


def sharded(method: F) -> F:
    """Declare that each data-parallel rank gets its part of the first argument of `method`."""
    method.__dict__["sharded"] = True
    return method


def never() -> bool:
    """Return False: there is no notice."""
    return False


@dataclass(frozen=True)
class WorkerContext:
    """A worker's place in its group, passed to its constructor as `context`.

    `device` is "cpu" or "cuda"; a worker on a GPU sees only that GPU, as device 0, regardless of its `local_rank`.
    `local_rank` numbers the workers of one machine from 0, `node_rank` numbers the machines in the order of ranks.
    `node` is the address of the worker's own machine (empty if the cluster has one); `master_addr` is an address of
    rank 0's machine. `deadline` is the time limit, in seconds, for forming the process group and for each collective.
    `notified()` returns whether the driver has called `WorkerGroup.notify` since it last returned True.
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
    notified: Callable[[], bool] = never


@dataclass(frozen=True)
class WorkerSpec:
    """The worker class to start, its constructor arguments, and the plugins that driver and workers must agree on.

    `target` is an import path `module:Class` and `kwargs` its constructor arguments. `part` is the kind and name under
    which a plugin registered the worker: a worker in another process looks it up among the plugins it finds itself and
    uses the class registered there. `fingerprint` maps plugin names to (distribution, version) as seen by the driver;
    each worker compares it with the plugins it finds, and raises `PluginError` if they differ. `plugins` are the
    modules that the configuration names. This group is number `replica` of `replicas` alike ones that run at the same
    time: it takes its share of a machine's cores, and GPUs after those of the groups before it. `gpus`: those that
    each worker gets on device cuda, as devices 0, 1... `notified`: the workers call `WorkerContext.notified`. A Ray
    group then serves their calls in one thread that is not the main thread.
    """

    target: str
    kwargs: Mapping[str, Any]
    plugins: tuple[str, ...] = ()
    fingerprint: Mapping[str, tuple[str, str]] | None = None
    py_executable: str | None = None
    part: tuple[str, str] | None = None
    replica: int = 0
    replicas: int = 1
    gpus: int = 1
    notified: bool = False


@dataclass
class MultiWorkerFuture:
    """A call in progress: `futures[i]` is the result of worker `called_workers[i]`.

    Only the results of the workers in `return_from_workers` are returned. `deadline`: time limit in seconds that
    overrides `deadlines.call`; a group need not support it. `method_name` is the called method, for messages.
    """

    futures: list[Any]
    return_from_workers: list[int] | None = None
    called_workers: list[int] | None = None
    deadline: float | None = None
    method_name: str = "a call"

    def get_results(self, worker_group: Any, return_generators_as_proxies: bool = False) -> list[Any]:
        """Return `worker_group.get_all_worker_results(self)`, of the group that started the calls."""
        options = {"return_generators_as_proxies": True} if return_generators_as_proxies else {}
        results: list[Any] = worker_group.get_all_worker_results(self, **options)
        return results


class WorkerGroup(ABC):
    """N workers of one class, called together.

    Starting: the constructor starts the workers and returns when all are ready. It raises `DeadlineExceeded` after
    `config.deadlines.start` seconds, saying what it was waiting for and what had arrived; `WorkerError` with the rank
    and traceback of a worker that failed; and `UserError` if the machine cannot run these workers, for example if it
    has too few GPUs. An rlframework error raised by a worker is re-raised with its own class, so that a user's mistake
    is reported as such.

    Arguments are sent as copies; functions and classes that workers cannot import, as those of a notebook, by value.

    Invalid calls reach no worker and leave the group usable: positional arguments, and arguments that cannot be sent to
    another process, raise `TypeError`; shards that do not match their axis raise `BatchError`; an unknown axis raises
    `ValueError`. (If only one worker's shard cannot be sent, the group may shut down instead.)

    Failing calls: as soon as one worker raises, dies or returns a result that cannot be sent, the call fails with a
    `WorkerError` that names its rank (`WorkerLost` if and only if the worker died), without waiting for the others. At
    the deadline it fails with a `DeadlineExceeded` that names the ranks that did not answer. The group is unusable
    afterwards: its processes are gone, and every call raises `WorkerError`. No process outlives the run, however the
    run ends, and none outlives `shutdown`.

    Arguments: workers run in separate processes and own their arguments; a worker may write to them without affecting
    anyone else. (They need not be copies. Memory may be shared until it is written to, so a worker that only reads
    is faster, and a worker that keeps one tensor of a large argument keeps the whole argument alive.)

    A group whose only worker is in the driver's process differs: arguments are passed by reference and must not be
    modified, the worker's exceptions are raised unchanged and leave the group usable, and deadlines do not apply.
    """

    notifies: bool = False
    """Whether `notify` reaches the workers: only if their `WorkerSpec.notified` is set, and the group can do so."""

    @abstractmethod
    def __init__(self, spec: WorkerSpec, config: WorkerGroupConfig, *, sharding: NamedSharding, device: str) -> None:
        """Start `sharding.size` workers of `spec.target`, each with `context=WorkerContext(...)`."""

    @property
    def ended(self) -> str | None:
        """Why the workers have ended, after which every call is a `WorkerError`; None while they can be called."""
        return None

    @property
    @abstractmethod
    def sharding(self) -> NamedSharding:
        """The layout of the group: pipeline_parallel, data_parallel, context_parallel, tensor_parallel."""

    @abstractmethod
    def run_single_worker_single_data(self, method_name: str, worker_idx: int, **kwargs: Any) -> MultiWorkerFuture:
        """Call `method_name` on worker `worker_idx` only; raise `IndexError` if there is no such worker."""

    @abstractmethod
    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *,
        run_rank_0_only_axes: Sequence[str] | None = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """Call `method_name` on the i-th worker with entry i of each of `kwargs`; all workers get `common_kwargs`.

        Each value is a list with one entry per called worker: all workers, or those at coordinate 0 on
        `run_rank_0_only_axes`. Raises `BatchError` for any other value, and if `kwargs` is empty.
        """

    @abstractmethod
    def run_all_workers_single_data(
        self, method_name: str, *, run_rank_0_only_axes: Sequence[str] | None = None, **kwargs: Any
    ) -> MultiWorkerFuture:
        """Call `method_name` on all workers with the same arguments.

        With `run_rank_0_only_axes`, only on those at coordinate 0 on these axes.
        """

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
        """Call `method_name` on each worker with its shard of `kwargs`.

        Each value is a list, nested in the order of `in_sharded_axes` and indexed by the worker's coordinates on these
        axes; all workers get `common_kwargs` unchanged. An axis that is neither sharded nor replicated is free: only
        coordinate 0 is called (with `make_dummy_calls_to_free_axes` the others are called with None for every
        argument). Results are returned from coordinate 0 of the free axes and of `output_is_replicated`, in the order
        of worker indices.
        """

    @abstractmethod
    def get_all_worker_results(self, future: MultiWorkerFuture) -> list[Any]:
        """Wait for `future`, at most `deadlines.call` seconds; return its results in the order of worker indices."""

    def when_done(self, future: MultiWorkerFuture, callback: Callable[[list[Any] | None], None]) -> bool:
        """Call `callback` once, in any thread, with the results of `future`; return whether that will happen.

        With None if the call has failed: `get_all_worker_results` then raises the error and ends the group. Does not
        wait, and does not watch the deadline. A group need not support it, or only for calls of one worker.
        """
        return False

    def notify(self) -> None:
        """Make `WorkerContext.notified` of each worker return True once, also during a call, so that it can end early.

        Does not wait, and may be called in any thread. A notice that comes after the call is seen by the next one. Does
        nothing if the group cannot notify workers (`notifies`) or has ended.
        """

    @abstractmethod
    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        """Call `cleanup_method` on all workers, then end them; return whether all of them ended cleanly.

        Waits at most `timeout` seconds, by default `deadlines.shutdown`. Idempotent: the clean-up is called once.
        Returns False, without an exception, if a worker was dead or its clean-up raised or took too long.
        """
