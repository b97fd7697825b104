"""`RayWorkerGroup`: workers of one class on the bundles of a `RayVirtualCluster`, called together.

Names, arguments and defaults follow NeMo-RL; docs/moving/nemo_rl.md lists the differences. `worker_group.name=ray`
starts the same group from a configuration, see `configured_group`.

All workers start at the same time, as `WorkerActor`s that import the worker's class themselves. They are restarted only
if that class needs other options: because of its `ray.remote`, its `configure_worker`, or coroutines.
"""

from __future__ import annotations

import builtins
import contextlib
import difflib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle

from rlframework.base.errors import WorkerError, WorkerLost
from rlframework.base.secrets import is_secret
from rlframework.config.sections import DeadlinesConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerContext, WorkerSpec
from rlframework.workers import dispatch, machine
from rlframework.workers.failures import FAILURE, HostFailure, root_cause
from rlframework.workers.remote_group import KILL_WAIT, SMALL, RemoteWorkerGroup, check_ranks
from rlframework_ray import heartbeat, runtime, transport, virtual_cluster
from rlframework_ray.placement import ClusterArgumentError, assign_workers, one_worker_per_bundle
from rlframework_ray.plugin import RayGroupConfig
from rlframework_ray.virtual_cluster import RayVirtualCluster
from rlframework_ray.worker_actor import NOTICES, Configuration, Description, Method
from rlframework_ray.worker_builder import (
    BoundMethod,
    RayWorkerBuilder,
    WorkerHandle,
    start_actor,
    worker_options,
)

__all__ = ["MultiWorkerFuture", "RayWorkerBuilder", "RayWorkerGroup"]

_MANY = 64
_GATHER = 0.05
"""Seconds in which further results of more than `_MANY` workers are gathered after the first: few waits for many."""


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
    `MASTER_ADDR` and `MASTER_PORT` (a reserved port) before their module is imported, those that
    `machine.worker_environment` names, and `env_vars`. `runtime_env` is passed to Ray, for example
    `{"py_executable": python}` for a Python environment with the same versions of Ray and Python that can import
    rlframework. With GPUs, a worker has one GPU, or its share if `max_colocated_worker_groups` groups share it. With a
    `name_prefix`, actors are named `prefix-node-bundle`, or `prefix-grpG-L` in tied groups of more than one worker.

    `workers` are their handles by rank, none after the group has ended. `worker_metadata` has by rank: node_idx,
    local_rank (in the tied group), global_rank, name, bundle_indices and dp_shard_idx. `dp_size` is the number of tied
    groups, and `dp_leader_worker_indices` are the ranks of their leaders.

    The constructor returns when all workers are constructed; `deadlines` are those of the configuration. The
    constructor and `get_all_worker_results` raise failures as `WorkerGroup` describes, as an exception that is also an
    instance of the built-in class that the worker raised, and end the workers. `ray.get` on the results of `run_*`
    raises Ray's own errors, without a deadline, and does not end the group.
    """

    workers: list[ActorHandle[Any]]
    worker_metadata: list[dict[str, Any]]
    dp_size: int

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
        self._heartbeat = heartbeat.Heartbeat({})
        self.workers = []
        self._items: dict[Any, Any] = {}
        places = cluster.placements()
        if bundle_indices_list is None:
            bundle_indices_list = one_worker_per_bundle(places, len(cluster.get_placement_groups()), workers_per_node)
        self._placements, self.worker_metadata = assign_workers(places, bundle_indices_list, name_prefix)
        leaders = [rank for rank, each in enumerate(self.worker_metadata) if each["local_rank"] == 0]
        self.dp_leader_worker_indices, self.dp_size = leaders, len(leaders)
        workers = len(self._placements)
        self._configured: Sequence[Configuration] = [Configuration()] * workers
        self._gpus = cluster.gpus_per_bundle / cluster.max_colocated_worker_groups if cluster.use_gpus else 0.0
        self._nodes = Counter(place.node_id for place in self._placements)
        sharding = sharding_annotations or NamedSharding(list(range(workers)), ["worker"])
        check_ranks(sharding, workers)
        deadlines, environment = deadlines or DeadlinesConfig(), dict(env_vars or {})
        config = RayGroupConfig(name="ray", num_workers=workers, deadlines=deadlines, environment=environment)
        device = "cuda" if cluster.use_gpus else "cpu"
        super().__init__(remote_worker_builder.spec, config, sharding=sharding, device=device)

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """The rank of the leader of a tied group; raises `IndexError` if there is no such group."""
        if not 0 <= dp_shard_idx < self.dp_size:
            raise IndexError(f"no dp_shard_idx {dp_shard_idx} in {self.dp_size} tied groups: use 0..{self.dp_size - 1}")
        return self.dp_leader_worker_indices[dp_shard_idx]

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
        futures = future_bundle.futures
        if return_generators_as_proxies:
            return dispatch.select_results(future_bundle, futures)
        if not all(isinstance(each, ray.ObjectRefGenerator) for each in futures):
            return super().get_all_worker_results(future_bundle)
        self._items = {each.completed(): each for each in futures}
        future = replace(future_bundle, futures=list(self._items), return_from_workers=None)
        return [item for items in super().get_all_worker_results(future) for item in items]

    def when_done(self, future: MultiWorkerFuture, callback: Callable[[list[Any] | None], None]) -> bool:
        """See `WorkerGroup.when_done`; only for calls of one worker that does not yield."""
        yields = any(isinstance(each, ray.ObjectRefGenerator) for each in future.futures)
        return not yields and super().when_done(future, callback)

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False) -> bool:
        """See `WorkerGroup.shutdown`; no `timeout` means no limit, and `force` ends the workers immediately."""
        return super().shutdown(None if force else cleanup_method, math.inf if timeout is None else timeout)

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
            raise ClusterArgumentError(f"{what} needs sharding_annotations: pass them to the group's constructor")

    def _run(self, method_name: str, plan: dispatch.Dispatch) -> MultiWorkerFuture:
        return RayCall(**vars(super()._run(method_name, plan)))

    def _call(self, rank: int, method: str, *args: Any) -> Callable[[], Any]:
        host = self._hosts[rank]
        if method != "call":
            return transport.packed_call(getattr(host, method), *args)
        name, wants_result, kwargs = args
        bound = BoundMethod(host, name, self._described.methods.get(name, Method()))
        return bound.prepare(wants_result, **kwargs)

    def _notify(self) -> None:
        for host in self._hosts:
            host.notify.options(concurrency_group=NOTICES, num_returns=0).remote()

    def _shared(self, value: Any) -> Any:
        return value if isinstance(value, ray.ObjectRef) else ray.put(transport.Packed(value))

    def _wait_any(self, refs: Mapping[Any, int], timeout: float) -> list[Any]:
        until, waiting = time.monotonic() + timeout, list(refs)
        while True:
            left = max(until - time.monotonic(), 0.0)
            ready: list[Any] = ray.wait(waiting, num_returns=1, timeout=min(left, heartbeat.PERIOD))[0]
            if len(ready) == len(waiting):
                return ready
            if ready:  # all that have arrived: a call for each would look at all of them as often as there are results
                more = _GATHER if len(waiting) > _MANY else 0
                return list(ray.wait(waiting, num_returns=len(waiting), timeout=more)[0])
            ready = [ref for ref, rank in refs.items() if self._heartbeat.is_silent(rank)]
            if ready or left <= heartbeat.PERIOD:
                return ready

    def _result(self, rank: int, ref: Any) -> Any:
        items = self._items.pop(ref, None)
        if self._heartbeat.is_silent(rank) and not ray.wait([ref], timeout=0)[0]:
            return HostFailure((), "it no longer answers: it is stopped, or its machine or network is down", "", True)
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

    def _when_done(self, rank: int, ref: Any, callback: Callable[[Any], None]) -> None:
        def arrived(done: Future[Any]) -> None:  # in a thread of Ray's, where `ray.get` may not wait
            error = done.exception()
            callback(done.result() if error is None else HostFailure.of(error))

        ref.future().add_done_callback(arrived)

    def _exception(self, failures: Mapping[int, HostFailure], doing: str) -> Exception:
        error = super()._exception(failures, doing)
        _add_builtin_base(error, failures[root_cause(failures)])
        return error

    # -- starting -----------------------------------------------------------------------------------------------------

    def _start(self, spec: WorkerSpec, device: str) -> None:
        self._claim_bundles(spec)
        self._machines = {machine.node_id: machine for machine in virtual_cluster.machines()}
        contexts, loading = self._load_in_actors(spec, device)
        self._described = self._wait({0: loading[0]}, f"importing {spec.target}", "start")[0]
        if self._described.is_async or self._described.configured or self._described.options:
            self._configured = self._described.configured or self._configured
            self._end_hosts()  # and wait, because their names and GPUs are needed again
            contexts, loading = self._load_in_actors(spec, device)
        self._wait(loading, f"importing {spec.target}", "start")
        self._heartbeat = heartbeat.Heartbeat(runtime.addresses_of(self._hosts))
        self.workers = [WorkerHandle(host, self._described) for host in self._hosts]
        self._wait(self._construct(contexts), f"constructing {spec.target}", "start")

    def _claim_bundles(self, spec: WorkerSpec) -> None:
        """Reject a group whose workers would never start, because other groups already share its bundles."""
        most, groups = self.cluster.max_colocated_worker_groups, (self, *self.cluster.groups)
        used = Counter((place.group, place.bundle) for group in groups for place in group._placements)
        if full := sorted(bundle for bundle, count in used.items() if count > most):
            raise ClusterArgumentError(
                f"a group of {spec.target}: bundle {full[0][1]} of placement group {full[0][0]} already has all {most} "
                "worker group(s) that it can hold: shut one down, or create the cluster with a larger "
                "max_colocated_worker_groups"
            )
        self.cluster.groups.add(self)

    def _load_in_actors(self, spec: WorkerSpec, device: str) -> tuple[list[WorkerContext], dict[int, Any]]:
        """Start the actors, and importing the class in each; return the contexts and the refs of the imports."""
        kind = {"is_async": self._described.is_async, "notified": self.notifies}
        self._hosts = [start_actor(each, **kind) for each in self._options()]
        contexts, loading = self._contexts(device), {}
        known = {"num_gpus": self._gpus, "num_gpus_per_node": self.cluster.num_gpus_per_node}
        workers = [{**known, "bundle_indices": each["bundle_indices"]} for each in self.worker_metadata]
        for rank, context in enumerate(contexts):
            own = {} if self._builder.passes_context else _rank_variables(context)
            variables = {name: text for name, text in self._environment(rank).items() if is_secret(name, text)} | own
            loading[rank] = self._send(rank, "load", spec, variables, context.node, [] if rank else workers)
        return contexts, loading

    def _construct(self, contexts: Sequence[WorkerContext]) -> dict[int, Any]:
        def stored(value: Any) -> Any:
            return value if isinstance(value, SMALL) else self._shared(value)

        args = list(map(stored, self._builder.args))
        kwargs = {name: stored(value) for name, value in self._builder.kwargs.items()}
        refs = {}
        for context, configured, host in zip(contexts, self._configured, self._hosts, strict=True):
            own = {**configured.init_kwargs, **({"context": context} if self._builder.passes_context else {})}
            refs[context.rank] = transport.packed_call(host.construct, *args, **{**kwargs, **own})()
        return refs

    def _options(self) -> list[dict[str, Any]]:
        """Ray's options of each worker."""
        passes_context = self._builder.passes_context
        fixed = {"num_cpus": 0} if passes_context else {}  # the bundle has them
        groups, options = self.cluster.get_placement_groups(), []
        for rank, place in enumerate(self._placements):
            named = {"name": self.worker_metadata[rank]["name"]} if self.name_prefix else {}
            # secrets come with `load`: Ray writes the runtime environment to its logs
            shown = {name: text for name, text in self._environment(rank).items() if not is_secret(name, text)}
            variables = {**shown, **(self._runtime_env.get("env_vars") or {})}
            each = worker_options(
                self._described,
                {**named, **fixed, "runtime_env": {**self._runtime_env, "env_vars": variables}},
                self._configured[rank],
                num_gpus=self._gpus,
                placement_group=groups[place.group],
                bundle=place.bundle,
                capture_child_tasks=not passes_context,
            )
            options.append(each)
        return options

    # -- where workers are --------------------------------------------------------------------------------------------

    def _environment(self, rank: int) -> dict[str, str]:
        """The environment variables of a worker."""
        node = self._placements[rank].node_id
        cores = int(self._machines[node].total.get("CPU", 0))
        workers = self._nodes[node] * math.ceil(self._builder.spec.replicas / max(1, len(self._machines)))
        given = machine.worker_environment(
            workers, self._config.environment, cores=cores, one_machine=len(self._nodes) == 1
        )
        return self._temporary.environment(given) if runtime.is_private() else given

    def _address(self) -> str:
        return self.cluster.address_of(self._placements[0])

    def _context(self, rank: int, context: WorkerContext) -> WorkerContext:
        place = self._placements[rank]
        # also for a group on one machine: a refit may connect it with engines on another
        node = place.address if len(self._machines) > 1 else ""
        context = super()._context(rank, context)
        return replace(context, local_rank=place.local_rank, node_rank=place.node_rank, node=node)

    def _location_text(self, rank: int) -> str:
        place = self._placements[rank]
        node = f" on node {self._machines[place.node_id].host}"
        return node if runtime.is_private() else f"{node} ({place.address}, {place.node_id[:8]})"

    def _describe_resources(self) -> str:
        return "" if runtime.is_private() else f"{self.cluster.resources_text()}\n"

    def _stderr_tail(self, rank: int) -> str:
        pid, where = self._pids.get(rank, (0, ""))
        if where == machine.identity() and ((tail := runtime.log_tail(pid)) or runtime.is_private()):
            return tail
        node = self._placements[rank].node_id
        if node not in {machine.node_id for machine in virtual_cluster.machines()}:
            return "\nits node has left the cluster"
        return runtime.log_tail_of(node, pid) if pid else ""

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end_hosts(self) -> bool:
        self._heartbeat.stop()
        hosts = self._hosts if ray.is_initialized() else []
        for host in hosts:
            ray.kill(host)
        return runtime.poll(hosts, runtime.is_dead, KILL_WAIT)

    def _on_ended(self) -> None:
        self._hosts, self.workers = [], []
        self.cluster.groups.discard(self)


def _rank_variables(context: WorkerContext) -> dict[str, str]:
    """The environment variables that `torch.distributed` reads, for a worker that does not get its context."""
    names = ("rank", "local_rank", "node_rank", "world_size", "master_addr", "master_port")
    return {name.upper(): str(getattr(context, name)) for name in names}


def _add_builtin_base(error: Exception, failure: HostFailure) -> None:
    """Make a `WorkerError` also an instance of the built-in class that the worker raised, for code that catches it."""
    kind = type(error)
    raised = [getattr(builtins, name, Exception) for module, name in failure.classes if module == "builtins"]
    if kind in (WorkerError, WorkerLost) and raised and raised[0] not in (Exception, BaseException):
        with contextlib.suppress(TypeError):  # a class with an incompatible instance layout
            attributes = {"__module__": kind.__module__, "__str__": kind.__str__}
            error.__class__ = type(kind.__name__, (kind, raised[0]), attributes)
