"""`RayWorkerGroup`: workers of one class on the bundles of a `RayVirtualCluster`, called together.

Names, arguments and defaults follow NeMo-RL, with these differences: `run_*` calls work without sharding annotations
unless they need them; a failure is reported with rank, node and the worker's own traceback, and ends the group; workers
get only the named variables of the driver's environment. `worker_group.name=ray` starts the same group from a
configuration, see `configured_group`.

All workers start at the same time, as `WorkerActor`s that import the worker's class themselves. They are restarted only
if that class turns out to need other options: because of its `ray.remote`, its `configure_worker`, or coroutines.
"""

from __future__ import annotations

import builtins
import contextlib
import difflib
import platform
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle

from rlframework.config.sections import DeadlinesConfig, RayGroupConfig
from rlframework.errors import WorkerError, WorkerLost
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerContext, WorkerSpec
from rlframework.workers import dispatch, machine
from rlframework.workers.failures import FAILURE, HostFailure, root_cause
from rlframework.workers.ray import placement, runtime, transport, virtual_cluster
from rlframework.workers.ray.placement import ClusterArgumentError, assign_workers, one_worker_per_bundle
from rlframework.workers.ray.virtual_cluster import RayVirtualCluster
from rlframework.workers.ray.worker_actor import Configuration, Description, Method
from rlframework.workers.ray.worker_builder import (
    BoundMethod,
    RayWorkerBuilder,
    WorkerHandle,
    constructor_call,
    start_actor,
    worker_options,
)
from rlframework.workers.remote_group import KILL_WAIT, RemoteWorkerGroup, check_ranks

__all__ = ["MultiWorkerFuture", "RayWorkerBuilder", "RayWorkerGroup"]

_NO_TIMEOUT = 3e8
"""In seconds: about ten years."""


class RayCall(MultiWorkerFuture, list[Any]):
    """A call that is also the list of its references, for `ray.get`."""

    def __init__(self, futures: list[Any], **details: Any) -> None:
        list.__init__(self, futures)
        MultiWorkerFuture.__init__(self, futures, **details)


class RayWorkerGroup(RemoteWorkerGroup):
    """One worker of `remote_worker_builder` on each bundle of `cluster`, or on the selected bundles.

    `workers_per_node` is the number of workers on each node, or a list with one number per node (default: one per
    bundle). `bundle_indices_list` selects bundles individually: entry i is `(node, [bundles])`, a tied group of one
    worker on each of these bundles, of which the first is the leader. `sharding_annotations` holds the ranks of the
    workers: 0, 1... in the order of the bundles.

    Workers get the environment variables `RANK`, `LOCAL_RANK` (the bundle on its node), `NODE_RANK`, `WORLD_SIZE`,
    `MASTER_ADDR` and `MASTER_PORT` (a reserved port), set before their module is imported. From the driver's
    environment they get the variables that `machine.worker_environment` names, and `env_vars`. `runtime_env` is passed
    to Ray, for example `{"py_executable": python}` for a role with its own Python environment, which must have the same
    versions of Ray and Python and be able to import rlframework. Neither dictionary is modified.

    With GPUs, a worker has one GPU, or its share if `max_colocated_worker_groups` groups share it. With a
    `name_prefix`, actors are named `prefix-node-bundle`, or `prefix-grpG-L` in tied groups of more than one worker.

    The constructor returns when all workers are constructed; `deadlines` are those of the configuration. The
    constructor and `get_all_worker_results` raise failures as `WorkerGroup` describes: the root cause with rank, node
    and traceback, as an exception that is also an instance of the built-in class that the worker raised. The workers
    are then ended. `ray.get` on the results of `run_*` raises Ray's own errors, without a deadline, and does not end
    the group.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        remote_worker_builder: RayWorkerBuilder,
        workers_per_node: int | list[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: list[tuple[int, list[int]]] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        *,
        runtime_env: Mapping[str, Any] | None = None,
        deadlines: DeadlinesConfig | None = None,
    ) -> None:
        self.cluster = cluster
        self.name_prefix = name_prefix
        self.sharding_annotations = sharding_annotations
        self._builder = remote_worker_builder
        self._runtime_env = dict(runtime_env or {})
        self._described = Description("")
        self._hosts: list[Any] = []
        self._handles: list[ActorHandle[Any]] = []
        self._items: dict[Any, Any] = {}
        places = cluster.placements()
        if bundle_indices_list is None:
            bundle_indices_list = one_worker_per_bundle(places, len(cluster.get_placement_groups()), workers_per_node)
        self._placements, self._metadata = assign_workers(places, bundle_indices_list, name_prefix)
        workers = len(self._placements)
        self._configured = [Configuration()] * workers
        self._nodes = Counter(place.node_id for place in self._placements)
        sharding = sharding_annotations or NamedSharding(list(range(workers)), ["worker"])
        check_ranks(sharding, workers)
        config = RayGroupConfig(
            name="ray",
            num_workers=workers,
            deadlines=deadlines or DeadlinesConfig(),
            environment=dict(env_vars or {}),
        )
        device = "cuda" if cluster.use_gpus else "cpu"
        super().__init__(remote_worker_builder.spec, config, sharding=sharding, device=device)

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[ActorHandle[Any]]:
        """The handles of the workers by rank; empty after the group has ended."""
        return list(self._handles)

    @property
    def worker_metadata(self) -> list[dict[str, Any]]:
        """By rank: node_idx, local_rank (in the tied group), global_rank, name, bundle_indices, dp_shard_idx."""
        return [dict(each) for each in self._metadata]

    @property
    def dp_leader_worker_indices(self) -> list[int]:
        """The ranks of the leaders of the tied groups."""
        return [rank for rank, each in enumerate(self._metadata) if each["local_rank"] == 0]

    @property
    def dp_size(self) -> int:
        """Number of tied groups."""
        return len(self.dp_leader_worker_indices)

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """The rank of the leader of a tied group; raises `IndexError` if there is no such group."""
        if not 0 <= dp_shard_idx < self.dp_size:
            raise IndexError(f"no dp_shard_idx {dp_shard_idx} in {self.dp_size} tied groups: use 0..{self.dp_size - 1}")
        return self.dp_leader_worker_indices[dp_shard_idx]

    # -- calls --------------------------------------------------------------------------------------------------------

    def run_single_worker_single_data(  # type: ignore[override]  # as in NeMo-RL
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> ray.ObjectRef[Any]:
        """Call `method_name` on worker `worker_idx` with these keyword arguments; return a reference to its result."""
        future = super().run_single_worker_single_data(method_name, worker_idx, *args, **kwargs)
        reference: ray.ObjectRef[Any] = future.futures[0]
        return reference

    def get_all_worker_results(
        self, future_bundle: MultiWorkerFuture, return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """Wait at most `deadlines.call` seconds for the results of `return_from_workers`, in that order.

        If the method yields, return the items of all workers, concatenated. With `return_generators_as_proxies`, return
        the references and generators themselves without waiting.
        """
        if return_generators_as_proxies:
            return dispatch.select_results(future_bundle, future_bundle.futures)
        futures = future_bundle.futures
        yields = [isinstance(each, ray.ObjectRefGenerator) for each in futures]
        if not any(yields):
            return super().get_all_worker_results(future_bundle)
        refs = [each.completed() if streams else each for each, streams in zip(futures, yields, strict=True)]
        self._items = {ref: each for ref, each, streams in zip(refs, futures, yields, strict=True) if streams}
        results = super().get_all_worker_results(replace(future_bundle, futures=refs, return_from_workers=None))
        return [item for each, streams in zip(results, yields, strict=True) for item in (each if streams else [each])]

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False) -> bool:
        """Call `cleanup_method` on all workers, wait at most `timeout` seconds (None: no limit), then end them.

        With `force`, end them immediately. Returns False if a worker did not end cleanly. Idempotent.
        """
        return super().shutdown(None if force else cleanup_method, _NO_TIMEOUT if timeout is None else timeout)

    def _check_call(self, method_name: str, args: Sequence[Any], axes: Sequence[str] | None, *, shards: bool) -> None:
        super()._check_call(method_name, args, axes, shards=shards)
        self._require_usable(method_name)
        described = self._described
        if method_name not in described.methods and not described.forwards:
            near = difflib.get_close_matches(method_name, described.methods, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"the worker {described.name} has no method {method_name!r}{hint}")
        if self.sharding_annotations is None and (shards or axes):
            what = f"run_rank_0_only_axes={list(axes)}" if axes else "run_all_workers_sharded_data"
            raise ClusterArgumentError(
                f"{what} needs sharding_annotations: pass them to the worker group's constructor"
            )

    @property
    def sharding(self) -> NamedSharding:
        """See `WorkerGroup.sharding`; without sharding annotations, all workers on one axis."""
        return self.sharding_annotations or self._sharding

    def _run(self, method_name: str, plan: dispatch.Dispatch) -> MultiWorkerFuture:
        return RayCall(**vars(super()._run(method_name, plan)))

    def _send(self, rank: int, method: str, *args: Any) -> Any:
        if method != "call":
            return getattr(self._hosts[rank], method).remote(*args)
        name, wants_result, names, *values = args
        described = self._described.methods.get(name, Method())
        return BoundMethod(self._hosts[rank], name, described).send(wants_result, names, *values)

    def _shared(self, value: Any) -> Any:
        return value if isinstance(value, ray.ObjectRef) else ray.put(transport.Packed(value))

    def _wait_any(self, refs: Sequence[Any], timeout: float) -> list[Any]:
        return list(ray.wait(list(refs), num_returns=1, timeout=timeout)[0])

    def _result(self, rank: int, ref: Any) -> Any:
        items = self._items.pop(ref, None)
        try:
            result = ray.get(ref)
            return result if items is None else [ray.get(item) for item in items]
        except ray.exceptions.RayTaskError as error:
            return getattr(error.cause, FAILURE, None) or HostFailure.of(error)
        except ray.exceptions.RayActorError as error:
            message = f"{str(error).strip()}{self._stderr_tail(rank)}"
            return replace(HostFailure.of(error), message=message, died=True)
        except Exception as error:  # noqa: BLE001 - for example a result that cannot be unpickled
            return HostFailure.of(error)

    def _exception(self, failures: Mapping[int, HostFailure], doing: str) -> Exception:
        error = super()._exception(failures, doing)
        _add_builtin_base(error, failures[root_cause(failures)])
        return error

    # -- starting -----------------------------------------------------------------------------------------------------

    def _prepare(self, spec: WorkerSpec, device: str) -> None:
        bundles = [(place.group, place.bundle) for place in self._placements]
        self.cluster.claim(bundles, f"a group of {spec.target}")
        runtime.acquire(id(self))
        self._release = weakref.finalize(self, _release, self.cluster, bundles, id(self))
        self._release.atexit = False
        self._machines = {machine.node_id: machine for machine in virtual_cluster.machines()}

    def _start(self, spec: WorkerSpec, device: str) -> None:
        options = self._options()
        contexts, loading = self._load_in_actors(spec, device, options)
        self._described = self._wait({0: loading[0]}, f"importing {spec.target}", "start")[0]
        if self._described.configures:
            workers = [(self._gpu_fraction(), each["bundle_indices"]) for each in self._metadata]
            ref = self._hosts[0].configure.remote(workers, self.cluster.num_gpus_per_node)
            self._configured = self._wait({0: ref}, "configure_worker", "start")[0]
        if self._described.is_async or any(map(_options_differ, options, self._options())):
            self._end_hosts()
            self._wait_for_other_machines(range(len(self._hosts)))  # their names and GPUs are needed again
            contexts, loading = self._load_in_actors(spec, device, self._options())
        self._wait(loading, f"importing {spec.target}", "start")
        self._handles = [WorkerHandle(host, self._described) for host in self._hosts]
        self._wait(self._construct(contexts), f"constructing {spec.target}", "start")

    def _load_in_actors(
        self, spec: WorkerSpec, device: str, options: Sequence[Mapping[str, Any]]
    ) -> tuple[list[WorkerContext], dict[int, Any]]:
        """Start the actors, and importing the class in each; return the contexts of the workers."""
        self._hosts = [start_actor(each, is_async=self._described.is_async) for each in options]
        contexts = self._contexts(device)
        loading = {}
        for rank, (host, context) in enumerate(zip(self._hosts, contexts, strict=True)):
            variables = {} if self._builder.passes_context else _rank_variables(context)
            loading[rank] = host.load.remote(spec, variables, context.node)
        return contexts, loading

    def _construct(self, contexts: Sequence[WorkerContext]) -> dict[int, Any]:
        args, kwargs = self._builder.args, self._builder.kwargs
        stored = self._store_shared([{**dict(enumerate(args)), **kwargs}] * len(self._hosts))
        call = constructor_call(
            [stored.get(id(value), value) for value in args],
            {name: stored.get(id(value), value) for name, value in kwargs.items()},
        )
        extra = [{"context": context} if self._builder.passes_context else {} for context in contexts]
        return {
            rank: host.construct.remote({**self._configured[rank].init_kwargs, **extra[rank]}, *call)
            for rank, host in enumerate(self._hosts)
        }

    def _options(self) -> list[dict[str, Any]]:
        """Ray's options of each worker."""
        groups = self.cluster.get_placement_groups()
        options = []
        for rank, place in enumerate(self._placements):
            variables = {**self._environment(rank), **(self._runtime_env.get("env_vars") or {})}
            requested: dict[str, Any] = {"runtime_env": {**self._runtime_env, "env_vars": variables}}
            if self.name_prefix:
                requested["name"] = self._metadata[rank]["name"]
            if self._builder.passes_context:
                requested["num_cpus"] = 0  # its bundle has them
            each = worker_options(
                self._described,
                requested,
                self._configured[rank],
                num_gpus=self._gpu_fraction(),
                placement_group=groups[place.group],
                bundle=place.bundle,
                capture_child_tasks=not self._builder.passes_context,
            )
            options.append(each)
        return options

    def _gpu_fraction(self) -> float:
        return 1 / self.cluster.max_colocated_worker_groups if self.cluster.use_gpus else 0

    # -- where workers are --------------------------------------------------------------------------------------------

    def _environment(self, rank: int) -> dict[str, str]:
        """The environment variables of a worker."""
        node = self._placements[rank].node_id
        cores = int(self._machines[node].total.get("CPU", 0))
        return machine.worker_environment(
            self._nodes[node], self._config.environment, cores=cores, one_machine=len(self._nodes) == 1
        )

    def _threads(self, rank: int) -> int | None:
        threads = self._environment(rank)["OMP_NUM_THREADS"]
        return int(threads) if threads.isdigit() else None

    def _address(self) -> str:
        return self.cluster.address_of(self._placements[0])

    def _context(self, rank: int, context: WorkerContext) -> WorkerContext:
        place = self._placements[rank]
        node = place.address if len(self._nodes) > 1 else ""
        context = super()._context(rank, context)
        return replace(context, local_rank=place.local_rank, node_rank=place.node_rank, node=node)

    def _location_text(self, rank: int) -> str:
        if runtime.is_private():
            return f" on node {platform.node()}"
        place = self._placements[rank]
        return f" on node {self._machines[place.node_id].host} ({place.address}, {place.node_id[:8]})"

    def _describe_resources(self) -> str:
        if runtime.is_private():
            return ""
        bundle = self.cluster.bundle
        available = placement.describe_machines(virtual_cluster.machines(), list(bundle))
        requested = f"{self._sharding.size} workers with {placement.describe(bundle)} each"
        return f"Requested: {requested}. The Ray cluster has\n{available}\n"

    def _stderr_tail(self, rank: int) -> str:
        pid, where = self._pids.get(rank, (0, ""))
        if where == machine.identity() and ((tail := runtime.log_tail(pid)) or runtime.is_private()):
            return tail
        node = self._placements[rank].node_id
        if node not in {machine.node_id for machine in virtual_cluster.machines()}:
            return "\nits node has left the cluster"
        return runtime.log_tail_of(node, pid) if pid else ""

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end_hosts(self) -> None:
        for host in self._hosts if ray.is_initialized() else ():
            ray.kill(host)

    def _wait_for_other_machines(self, ranks: Sequence[int]) -> bool:
        """Wait until Ray reports that these actors have ended, or their machines are gone; return whether they have."""
        return runtime.poll([self._hosts[rank] for rank in ranks], runtime.is_dead, KILL_WAIT)

    def _on_ended(self) -> None:
        self._hosts, self._handles = [], []
        self._release()


def _release(cluster: RayVirtualCluster, bundles: Sequence[tuple[int, int]], user: int) -> None:
    cluster.release_claim(bundles)
    runtime.release(user)


def _rank_variables(context: WorkerContext) -> dict[str, str]:
    """The environment variables that `torch.distributed` reads, for a worker that does not get its context."""
    return {
        "RANK": str(context.rank),
        "LOCAL_RANK": str(context.local_rank),
        "NODE_RANK": str(context.node_rank),
        "WORLD_SIZE": str(context.world_size),
        "MASTER_ADDR": context.master_addr,
        "MASTER_PORT": str(context.master_port),
    }


def _options_differ(first: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether two sets of options differ, apart from the scheduling strategy, which does not compare."""
    return {**first, "scheduling_strategy": None} != {**wanted, "scheduling_strategy": None}


def _add_builtin_base(error: Exception, failure: HostFailure) -> None:
    """Make a `WorkerError` also an instance of the built-in class that the worker raised, for code that catches it."""
    kind = type(error)
    raised = [getattr(builtins, name, Exception) for module, name in failure.classes if module == "builtins"]
    if kind in (WorkerError, WorkerLost) and raised and raised[0] not in (Exception, BaseException):
        with contextlib.suppress(TypeError):  # a class with an incompatible instance layout
            attributes = {"__module__": kind.__module__, "__str__": kind.__str__}
            error.__class__ = type(kind.__name__, (kind, raised[0]), attributes)
