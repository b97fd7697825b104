"""`ActorGroup`: the processes behind a `RayWorkerGroup`, started and ended together.

Waiting, failures, deadlines and shutdown are inherited from `RemoteWorkerGroup`. All workers start at the same time, as
`WorkerActor`s that import the worker's class themselves. They are restarted only if that class turns out to need other
options: because of its `ray.remote`, its `configure_worker`, or coroutines.
"""

from __future__ import annotations

import builtins
import contextlib
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlframework.config.sections import DeadlinesConfig, RayGroupConfig
from rlframework.errors import WorkerError, WorkerLost
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerSpec
from rlframework.workers.failures import HostFailure, as_exception, root_cause
from rlframework.workers.ray import runtime
from rlframework.workers.ray.placement import Placement
from rlframework.workers.ray.remote_group import RayRemoteWorkerGroup
from rlframework.workers.ray.virtual_cluster import RayVirtualCluster
from rlframework.workers.ray.worker_actor import FAILURE
from rlframework.workers.ray.worker_builder import RayWorkerBuilder, start_actor, worker_options
from rlframework.workers.ray.worker_class import Configuration, Description
from rlframework.workers.remote_group import Call

if TYPE_CHECKING:
    from rlframework.interfaces.named_sharding import NamedSharding
    from rlframework.workers.ray.worker_handle import WorkerHandle

_KILL_WAIT = 5.0
_UNKNOWN = Description("", {}, {}, is_async=False, configures=False)


@dataclass(frozen=True)
class WorkerAssignment:
    """The placement of a worker, its tied group, and the name of its actor.

    `bundles` are those of the tied group, and None for all workers but its first.
    """

    placement: Placement
    tied_group: int
    tied_rank: int
    bundles: tuple[int, list[int]] | None
    name: str


class ActorGroup(RayRemoteWorkerGroup):
    """One `WorkerActor` for each of `assignments`, in rank order."""

    def __init__(
        self,
        cluster: RayVirtualCluster,
        builder: RayWorkerBuilder,
        assignments: Sequence[WorkerAssignment],
        *,
        sharding: NamedSharding,
        deadlines: DeadlinesConfig,
        environment: Mapping[str, str],
        runtime_env: Mapping[str, Any],
        named: bool,
    ) -> None:
        self._shared_cluster = cluster
        self._builder = builder
        self._assignments = list(assignments)
        self._runtime_env = dict(runtime_env)
        self._named = named
        self._described = _UNKNOWN
        self._failed: dict[int, HostFailure] = {}
        self.handles: list[WorkerHandle] = []
        config = RayGroupConfig(
            name="ray", num_workers=len(assignments), deadlines=deadlines, environment=dict(environment)
        )
        spec = WorkerSpec(builder.ray_actor_class_fqn, builder.kwargs)
        super().__init__(spec, config, sharding=sharding, device="cuda" if cluster.use_gpus else "cpu")

    @property
    def described(self) -> Description:
        """Describes the class of the workers."""
        return self._described

    # -- starting -----------------------------------------------------------------------------------------------------

    def _prepare(self, spec: WorkerSpec, device: str) -> None:
        self._hosts = []
        self._cluster = self._shared_cluster
        self._settings = self._config  # type: ignore[assignment]
        self._placements = [assignment.placement for assignment in self._assignments]
        self._cores, self._names = runtime.cores_and_names()
        bundles = [(placement.group, placement.bundle) for placement in self._placements]
        self._shared_cluster.claim(bundles, f"a group of {spec.target}")
        runtime.acquire(id(self))
        self._release = weakref.finalize(self, _release, self._shared_cluster, bundles, id(self))
        self._release.atexit = False

    def _start(self, spec: WorkerSpec, device: str) -> None:
        started, ranks = time.monotonic(), range(self._sharding.size)

        def wait(refs: dict[int, Any], doing: str) -> dict[int, Any]:
            return self._wait(refs, doing, "start", self._deadlines.start, started)

        def load() -> dict[int, Any]:
            """Start importing the class in all workers, once rank 0 has reserved its address."""
            address, port = wait({0: self._hosts[0].reserve_address.remote(self._location(0).address)}, "starting")[0]
            return {
                rank: self._hosts[rank].load.remote(
                    spec.target, self._identity(rank, address, port), self._location(rank).node
                )
                for rank in ranks
            }

        no_configuration = [Configuration()] * len(ranks)
        first = [self._options(rank, _UNKNOWN, no_configuration[rank]) for rank in ranks]
        self._start_actors(first, is_async=False)
        loading = load()
        self._described = wait({0: loading[0]}, f"importing {spec.target}")[0]
        configured = self._configured(wait) if self._described.configures else no_configuration
        wanted = [self._options(rank, self._described, configured[rank]) for rank in ranks]
        if self._described.is_async or any(map(_options_differ, first, wanted)):
            self._kill_and_wait()
            self._start_actors(wanted, is_async=self._described.is_async)
            loading = load()
        self._record_pids(wait({rank: self._hosts[rank].pid.remote() for rank in ranks}, "starting"))
        wait(loading, f"importing {spec.target}")
        self._make_handles()
        wait(self._construct(configured), f"constructing {spec.target}")

    def _configured(self, wait: Any) -> list[Configuration]:
        workers = [(self._gpu_fraction(), assignment.bundles) for assignment in self._assignments]
        ref = self._hosts[0].configure.remote(workers, self._shared_cluster.num_gpus_per_node)
        configurations: list[Configuration] = wait({0: ref}, "configure_worker")[0]
        return configurations

    def _construct(self, configured: Sequence[Configuration]) -> dict[int, Any]:
        names = [None] * len(self._builder.args) + list(self._builder.kwargs)
        values = [*self._builder.args, *self._builder.kwargs.values()]
        by_position = {str(position): value for position, value in enumerate(values)}
        stored = self._store_shared([by_position for _ in self._hosts])
        sent = [stored.get(id(value), value) for value in values]
        return {
            rank: host.construct.remote(dict(configured[rank].init_kwargs), names, *sent)
            for rank, host in enumerate(self._hosts)
        }

    def _start_actors(self, options: Sequence[Mapping[str, Any]], *, is_async: bool) -> None:
        self._hosts = [start_actor(each, is_async=is_async) for each in options]

    def _options(self, rank: int, described: Description, configured: Configuration) -> dict[str, Any]:
        assignment = self._assignments[rank]
        variables = {**self._environment(rank), **(self._runtime_env.get("env_vars") or {})}
        requested: dict[str, Any] = {"runtime_env": {**self._runtime_env, "env_vars": variables}}
        if self._named:
            requested["name"] = assignment.name
        return worker_options(
            described,
            requested,
            configured,
            num_gpus=self._gpu_fraction(),
            placement_group=self._shared_cluster.get_placement_groups()[assignment.placement.group],
            bundle=assignment.placement.bundle,
        )

    def _gpu_fraction(self) -> float:
        return 1 / self._shared_cluster.max_colocated_worker_groups if self._shared_cluster.use_gpus else 0

    def _identity(self, rank: int, address: str, port: int) -> dict[str, str]:
        """The environment variables that `torch.distributed` reads."""
        place = self._placements[rank]
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(place.local_rank),
            "NODE_RANK": str(place.node_rank),
            "WORLD_SIZE": str(len(self._placements)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }

    def _make_handles(self) -> None:
        from rlframework.workers.ray.worker_handle import WorkerHandle

        self.handles = [WorkerHandle(host, self._described) for host in self._hosts]

    def _kill_and_wait(self) -> None:
        """Kill the actors and wait until Ray has noticed, because their names and GPUs are needed again."""
        import ray

        for host in self._hosts:
            ray.kill(host)
        until = time.monotonic() + _KILL_WAIT
        while time.monotonic() < until and not all(map(runtime.is_dead, self._hosts)):
            time.sleep(0.02)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _call(self, rank: int, method_name: str, wants_result: bool, names: Sequence[str], *values: Any) -> Any:
        return getattr(self.handles[rank], method_name).send(wants_result, names, *values)

    def _argument(self, value: Any) -> Any:
        return self._sent(value)

    def _shared(self, value: Any) -> Any:
        return value if _is_reference(value) else super()._shared(value)

    def _result(self, rank: int, ref: Any) -> Any:
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            self._failed[rank] = getattr(error.cause, FAILURE, None) or HostFailure.of(error)
            return self._failed[rank]
        except Exception:  # noqa: BLE001 - handled by the base class, which gets the result again
            return super()._result(rank, ref)

    def _collect(
        self, refs: dict[int, Any], doing: str, deadline: str, seconds: float, started: float
    ) -> dict[int, Any]:
        self._failed.clear()
        try:
            return super()._collect(refs, doing, deadline, seconds, started)
        except WorkerError as error:
            if self._failed:
                _add_builtin_base(error, self._failed[root_cause(self._failed)])
            raise

    def stream(self, future: MultiWorkerFuture) -> list[Any]:
        """All items of the generators of `future`, and its other results, concatenated in the order of its futures."""
        doing = future.method_name if isinstance(future, Call) else "a call"
        ranks = list(range(len(future.futures))) if future.called_workers is None else future.called_workers
        items: list[list[Any]] = [[] for _ in future.futures]
        left = {index: each for index, each in enumerate(future.futures) if is_generator(each)}
        until = time.monotonic() + self._deadlines.call
        try:
            while left:
                ready = self._wait_any(list(left.values()), max(until - time.monotonic(), 0.0))
                if not ready:
                    missing = sorted(ranks[index] for index in left)
                    self._raise_deadline(missing, [], doing, "call", self._deadlines.call)
                for index in [index for index, each in left.items() if any(each is other for other in ready)]:
                    if not self._take(left[index], ranks[index], items[index], doing):
                        del left[index]
        except BaseException as error:
            self._end(f"{doing} ended with {type(error).__name__}")
            raise
        plain = {index: each for index, each in enumerate(future.futures) if not is_generator(each)}
        for index, result in self._wait(plain, doing, "call", self._deadlines.call).items():
            items[index].append(result)
        return [item for of_worker in items for item in of_worker]

    def _take(self, generator: Any, rank: int, items: list[Any], doing: str) -> bool:
        """Append the next item of a generator to `items`; return False at its end."""
        try:
            ref = next(generator)
        except StopIteration:
            return False
        item = self._result(rank, ref)
        if isinstance(item, HostFailure):
            error = as_exception({rank: item}, self._sharding.size, doing, self._location_text)
            _add_builtin_base(error, item)
            raise error
        items.append(item)
        return True

    # -- the end ------------------------------------------------------------------------------------------------------

    def _on_ended(self) -> None:
        self._hosts, self.handles = [], []
        self._release()


def _release(cluster: RayVirtualCluster, bundles: Sequence[tuple[int, int]], user: int) -> None:
    cluster.release_claim(bundles)
    runtime.release(user)


def _options_differ(first: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether two sets of options differ, apart from the scheduling strategy, which does not compare."""
    ignored = "scheduling_strategy"
    return {k: v for k, v in first.items() if k != ignored} != {k: v for k, v in wanted.items() if k != ignored}


def _add_builtin_base(error: Exception, failure: HostFailure) -> None:
    """Make a `WorkerError` also an instance of the built-in class that the worker raised, for code that catches it."""
    kind = type(error)
    for module, name in failure.classes:
        raised = getattr(builtins, name, None) if module == "builtins" else None
        if raised in (None, Exception, BaseException, object) or kind not in (WorkerError, WorkerLost):
            continue
        with contextlib.suppress(TypeError):  # a class with an incompatible instance layout
            error.__class__ = type(
                kind.__name__, (kind, raised), {"__module__": kind.__module__, "__str__": kind.__str__}
            )
        return


def _is_reference(value: Any) -> bool:
    """Whether `value` refers to an object in Ray's store; the worker gets that object."""
    import ray

    return isinstance(value, ray.ObjectRef)


def is_generator(future: Any) -> bool:
    """Whether the future is a generator of several results."""
    import ray

    return isinstance(future, ray.ObjectRefGenerator)
