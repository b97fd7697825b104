"""`ActorGroup`: the processes behind a `RayWorkerGroup`: started, told who they are, watched and ended together.

Waiting, blame, deadlines and the end are those of all groups of processes, see `hosted`. All workers start at once, as
`WorkerActor`s that import their class themselves: no process does it before them. Only where the class turns out to
want other options (those of its `ray.remote`, its `configure_worker`, coroutines), they are started anew with them.
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
from rlframework.workers import machine
from rlframework.workers.failures import HostFailure, as_exception, blame
from rlframework.workers.hosted_group import Call
from rlframework.workers.ray import runtime
from rlframework.workers.ray.hosted_group import RayHostedGroup
from rlframework.workers.ray.placement import Placement
from rlframework.workers.ray.virtual_cluster import RayVirtualCluster
from rlframework.workers.ray.worker_actor import FAILURE
from rlframework.workers.ray.worker_builder import RayWorkerBuilder, start_actor, worker_options
from rlframework.workers.ray.worker_class import Configuration, Description

if TYPE_CHECKING:
    from rlframework.interfaces.named_sharding import NamedSharding
    from rlframework.workers.ray.worker_handle import WorkerHandle

_KILL_WAIT = 5.0
_UNKNOWN = Description("", {}, {}, is_async=False, configures=False)


@dataclass(frozen=True)
class Seat:
    """Where a worker sits. `bundles`: those of its tied group, known to the first of them only; `name`: its actor's."""

    place: Placement
    tied_group: int
    tied_rank: int
    bundles: tuple[int, list[int]] | None
    name: str


class ActorGroup(RayHostedGroup):
    """One `WorkerActor` for each of `seats`, in the order of ranks."""

    def __init__(
        self,
        cluster: RayVirtualCluster,
        builder: RayWorkerBuilder,
        seats: Sequence[Seat],
        *,
        sharding: NamedSharding,
        deadlines: DeadlinesConfig,
        environment: Mapping[str, str],
        runtime_env: Mapping[str, Any],
        named: bool,
    ) -> None:
        self._shared_cluster = cluster
        self._builder = builder
        self._seats = list(seats)
        self._runtime_env = dict(runtime_env)
        self._named = named
        self._described = _UNKNOWN
        self._failed: dict[int, HostFailure] = {}
        self.handles: list[WorkerHandle] = []
        config = RayGroupConfig(name="ray", num_workers=len(seats), deadlines=deadlines, environment=dict(environment))
        spec = WorkerSpec(builder.ray_actor_class_fqn, builder.kwargs)
        super().__init__(spec, config, sharding=sharding, device="cuda" if cluster.use_gpus else "cpu")

    @property
    def described(self) -> Description:
        """The class of the workers."""
        return self._described

    # -- starting -----------------------------------------------------------------------------------------------------

    def _prepare(self, spec: WorkerSpec, device: str) -> None:
        self._hosts = []
        self._cluster = self._shared_cluster
        self._settings = self._config  # type: ignore[assignment]
        self._places = [seat.place for seat in self._seats]
        self._cores, self._names = runtime.cores_and_names()
        bundles = [(place.group, place.bundle) for place in self._places]
        self._shared_cluster.claim(bundles, f"a group of {spec.target}")
        runtime.acquire(id(self))
        self._free = weakref.finalize(self, _give_back, self._shared_cluster, bundles, id(self))
        self._free.atexit = False

    def _start(self, spec: WorkerSpec, device: str) -> None:
        begun, ranks = time.monotonic(), range(self._sharding.size)

        def wait(refs: dict[int, Any], doing: str) -> dict[int, Any]:
            return self._wait(refs, doing, "start", self._deadlines.start, begun)

        def load() -> dict[int, Any]:
            """Begin to import the class everywhere; the first to know its address is rank 0."""
            address, port = wait({0: self._hosts[0].reserve_address.remote(self._place(0).address)}, "starting")[0]
            return {
                rank: self._hosts[rank].load.remote(
                    spec.target, self._identity(rank, address, port), self._place(rank).node
                )
                for rank in ranks
            }

        nothing = [Configuration()] * len(ranks)
        first = [self._options(rank, _UNKNOWN, nothing[rank]) for rank in ranks]
        self._begin(first, is_async=False)
        loading = load()
        self._described = wait({0: loading[0]}, f"importing {spec.target}")[0]
        configured = self._configured(wait) if self._described.configures else nothing
        wanted = [self._options(rank, self._described, configured[rank]) for rank in ranks]
        if self._described.is_async or any(map(_differ, first, wanted)):
            self._kill_for_restart()
            self._begin(wanted, is_async=self._described.is_async)
            loading = load()
        self._learn_pids(wait({rank: self._hosts[rank].pid.remote() for rank in ranks}, "starting"))
        wait(loading, f"importing {spec.target}")
        self._make_handles()
        wait(self._construct(configured), f"constructing {spec.target}")

    def _configured(self, wait: Any) -> list[Configuration]:
        asked = [(self._share_of_gpu(), seat.bundles) for seat in self._seats]
        ref = self._hosts[0].configure.remote(asked, self._shared_cluster.num_gpus_per_node)
        answer: list[Configuration] = wait({0: ref}, "configure_worker")[0]
        return answer

    def _construct(self, configured: Sequence[Configuration]) -> dict[int, Any]:
        names = [None] * len(self._builder.args) + list(self._builder.kwargs)
        values = [*self._builder.args, *self._builder.kwargs.values()]
        by_place = {str(place): value for place, value in enumerate(values)}
        alike = self._store_shared([by_place for _ in self._hosts])
        sent = [alike.get(id(value), value) for value in values]
        return {
            rank: host.construct.remote(dict(configured[rank].init_kwargs), names, *sent)
            for rank, host in enumerate(self._hosts)
        }

    def _begin(self, options: Sequence[Mapping[str, Any]], *, is_async: bool) -> None:
        self._hosts = [start_actor(each, is_async=is_async) for each in options]

    def _options(self, rank: int, described: Description, configured: Configuration) -> dict[str, Any]:
        seat = self._seats[rank]
        given = self._runtime_env.get("env_vars") or {}
        asked: dict[str, Any] = {"runtime_env": {**self._runtime_env, "env_vars": {**self._environment(rank), **given}}}
        if self._named:
            asked["name"] = seat.name
        return worker_options(
            described,
            asked,
            configured,
            num_gpus=self._share_of_gpu(),
            placement_group=self._shared_cluster.get_placement_groups()[seat.place.group],
            bundle=seat.place.bundle,
        )

    def _share_of_gpu(self) -> float:
        return 1 / self._shared_cluster.max_colocated_worker_groups if self._shared_cluster.use_gpus else 0

    def _identity(self, rank: int, address: str, port: int) -> dict[str, str]:
        """Who a worker is, in the environment variables of `torch.distributed`."""
        place = self._places[rank]
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(place.local_rank),
            "NODE_RANK": str(place.node_rank),
            "WORLD_SIZE": str(len(self._places)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }

    def _learn_pids(self, answers: Mapping[int, tuple[int, str]]) -> None:
        for rank, (pid, where) in answers.items():
            (self._pids if where == machine.identity() else self._elsewhere)[rank] = pid

    def _make_handles(self) -> None:
        from rlframework.workers.ray.worker_handle import WorkerHandle

        self.handles = [WorkerHandle(host, self._described) for host in self._hosts]

    def _kill_for_restart(self) -> None:
        """End the actors and wait until Ray knows it: their names and GPUs are needed again."""
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

    def _answer(self, rank: int, ref: Any) -> Any:
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            self._failed[rank] = getattr(error.cause, FAILURE, None) or HostFailure.of(error)
            return self._failed[rank]
        except Exception:  # noqa: BLE001 - told by the base, which asks again
            return super()._answer(rank, ref)

    def _collect(self, refs: dict[int, Any], doing: str, deadline: str, seconds: float, begun: float) -> dict[int, Any]:
        self._failed.clear()
        try:
            return super()._collect(refs, doing, deadline, seconds, begun)
        except WorkerError as error:
            if self._failed:
                _make_also(error, self._failed[blame(self._failed)])
            raise

    def stream(self, future: MultiWorkerFuture) -> list[Any]:
        """All that the generators of `future` (and what else is in it) give, one after the other, as they stand."""
        doing = future.method_name if isinstance(future, Call) else "a call"
        ranks = list(range(len(future.futures))) if future.called_workers is None else future.called_workers
        given: list[list[Any]] = [[] for _ in future.futures]
        left = {index: each for index, each in enumerate(future.futures) if is_generator(each)}
        until = time.monotonic() + self._deadlines.call
        try:
            while left:
                ready = self._ready(list(left.values()), max(until - time.monotonic(), 0.0))
                if not ready:
                    missing = sorted(ranks[index] for index in left)
                    self._tell_deadline(missing, [], doing, "call", self._deadlines.call)
                for index in [index for index, each in left.items() if any(each is other for other in ready)]:
                    if not self._take(left[index], ranks[index], given[index], doing):
                        del left[index]
        except BaseException as error:
            self._end(f"{doing} ended with {type(error).__name__}")
            raise
        plain = {index: each for index, each in enumerate(future.futures) if not is_generator(each)}
        for index, answer in self._wait(plain, doing, "call", self._deadlines.call).items():
            given[index].append(answer)
        return [each for of_worker in given for each in of_worker]

    def _take(self, generator: Any, rank: int, given: list[Any], doing: str) -> bool:
        """One more item of a generator; False at its end."""
        try:
            ref = next(generator)
        except StopIteration:
            return False
        answer = self._answer(rank, ref)
        if isinstance(answer, HostFailure):
            error = as_exception({rank: answer}, self._sharding.size, doing, self._where)
            _make_also(error, answer)
            raise error
        given.append(answer)
        return True

    # -- the end ------------------------------------------------------------------------------------------------------

    def _released(self) -> None:
        self._hosts, self.handles = [], []
        self._free()


def _give_back(cluster: RayVirtualCluster, bundles: Sequence[tuple[int, int]], user: int) -> None:
    cluster.unclaim(bundles)
    runtime.release(user)


def _differ(first: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether two sets of options differ in more than their place, which is the same."""
    place = "scheduling_strategy"
    return {k: v for k, v in first.items() if k != place} != {k: v for k, v in wanted.items() if k != place}


def _make_also(error: Exception, failure: HostFailure) -> None:
    """Make a `WorkerError` also one of the class of Python's own that the worker raised: who catches that goes on."""
    kind = type(error)
    for module, name in failure.classes:
        raised = getattr(builtins, name, None) if module == "builtins" else None
        if raised in (None, Exception, BaseException, object) or kind not in (WorkerError, WorkerLost):
            continue
        with contextlib.suppress(TypeError):  # a class whose instances are laid out in another way
            error.__class__ = type(
                kind.__name__, (kind, raised), {"__module__": kind.__module__, "__str__": kind.__str__}
            )
        return


def _is_reference(value: Any) -> bool:
    """What stands for an object in Ray's store: the worker gets that object."""
    import ray

    return isinstance(value, ray.ObjectRef)


def is_generator(future: Any) -> bool:
    """Whether it gives many results, one after the other."""
    import ray

    return isinstance(future, ray.ObjectRefGenerator)
