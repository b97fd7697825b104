"""`RayWorkerGroup`: workers of one class on the bundles of a `RayVirtualCluster`, called together.

Names, arguments and defaults follow NeMo-RL. What differs: `run_*` calls work without sharding annotations where they
need none; a failure is told with rank, node and the worker's own traceback, and ends the group; of the driver's
environment workers get what is named and no more. The group behind the configuration's word `ray` is
`ray_group.RayHostedGroup`; both are the same underneath.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlframework.config.sections import DeadlinesConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import MultiWorkerFuture
from rlframework.workers import dispatch
from rlframework.workers.ray.actor_group import ActorGroup, Seat, is_generator
from rlframework.workers.ray.virtual_cluster import ClusterArgumentError, RayVirtualCluster
from rlframework.workers.ray.worker_builder import RayWorkerBuilder

if TYPE_CHECKING:
    import ray
    from ray.actor import ActorHandle

__all__ = ["MultiWorkerFuture", "RayWorkerBuilder", "RayWorkerGroup"]

_FOR_EVER = 3e8
"""Seconds: some ten years."""


class RayWorkerGroup:
    """One worker of `remote_worker_builder` on each bundle of `cluster`, or on those that are chosen.

    `workers_per_node` is how many on each node (or a list with one number for each), all its bundles without it.
    `bundle_indices_list` chooses them one by one: entry i is `(node, [bundles])`, a tied group of one worker on each of
    these bundles; the first of them is its leader. `sharding_annotations` says where each worker stands, its ranks are
    those of the workers: 0, 1... in the order of the bundles.

    A worker finds who it is in the environment variables `RANK`, `LOCAL_RANK` (its bundle on its node), `NODE_RANK`,
    `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` (a port that is kept for it), set before its module is imported. Of
    the driver's environment it gets what `machine.worker_environment` names, and `env_vars`. `runtime_env` is Ray's for
    the workers, such as `{"py_executable": python}` for a role with a Python environment of its own, in which Ray and
    Python have the same versions and rlframework can be imported. Neither dictionary is changed.

    With GPUs a worker has one, or its share where `max_colocated_worker_groups` groups share it. With a `name_prefix`
    the actors are named `prefix-node-bundle`, or `prefix-grpG-L` where more than one is tied.

    The constructor returns when all workers are constructed; `deadlines` are those of the configuration. What fails
    is told as `WorkerGroup` says, in the constructor and in `get_all_worker_results`: the first failure, with rank,
    node and traceback, as an exception that is also of the class that the worker raised, where Python has it. The
    workers are then ended. `ray.get` on what `run_*` returned raises what Ray says, without a deadline, and ends
    nothing.
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
        self._env_vars = dict(env_vars or {})
        self._runtime_env = dict(runtime_env or {})
        self._deadlines = deadlines or DeadlinesConfig()
        self.dp_leader_worker_indices: list[int] = []
        self._metadata: list[dict[str, Any]] = []
        chosen = _each_alone(cluster, workers_per_node) if bundle_indices_list is None else bundle_indices_list
        self._create_workers_from_bundle_indices(remote_worker_builder, chosen)

    def _create_workers_from_bundle_indices(
        self, remote_worker_builder: RayWorkerBuilder, bundle_indices_list: Sequence[tuple[int, list[int]]]
    ) -> None:
        """Start a worker for each bundle of each tied group, and return when all are constructed."""
        seats = self._seated(bundle_indices_list)
        self._actors = ActorGroup(
            self.cluster,
            remote_worker_builder,
            seats,
            sharding=_checked_sharding(self.sharding_annotations, len(seats)),
            deadlines=self._deadlines,
            environment=self._env_vars,
            runtime_env=self._runtime_env,
            named=bool(self.name_prefix),
        )

    def _seated(self, bundle_indices_list: Sequence[tuple[int, list[int]]]) -> list[Seat]:
        """The seat of each worker; metadata and leaders on the way."""
        where = {(place.group, place.bundle): place for place in self.cluster.placements()}
        self._metadata, self.dp_leader_worker_indices = [], []
        seats: list[Seat] = []
        for group, (node, bundles) in enumerate(bundle_indices_list):
            for tied_rank, bundle in enumerate(bundles):
                if (node, bundle) not in where:
                    raise ClusterArgumentError(f"no bundle {bundle} on node {node}; there are {sorted(where)}")
                tied = (node, list(bundles)) if tied_rank == 0 else None
                which = f"{node}-{bundle}" if len(bundles) == 1 else f"grp{group}-{tied_rank}"
                seats.append(Seat(where[node, bundle], group, tied_rank, tied, f"{self.name_prefix}-{which}"))
                self._note(seats[-1], len(seats) - 1)
        if not seats:
            raise ClusterArgumentError("a worker group without workers: give at least one bundle")
        return seats

    def _note(self, seat: Seat, rank: int) -> None:
        if seat.tied_rank == 0:
            self.dp_leader_worker_indices.append(rank)
        self._metadata.append(
            {
                "node_idx": seat.place.group,
                "local_rank": seat.tied_rank,
                "global_rank": rank,
                "name": seat.name,
                "bundle_indices": seat.bundles,
                "dp_shard_idx": seat.tied_group,
            }
        )

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[ActorHandle[Any]]:
        """The handles of the workers by rank; none after the end."""
        return list(self._actors.handles)

    @property
    def worker_metadata(self) -> list[dict[str, Any]]:
        """By rank: node_idx, local_rank (in the tied group), global_rank, name, bundle_indices, dp_shard_idx."""
        return [dict(each) for each in self._metadata]

    @property
    def dp_size(self) -> int:
        """Number of tied groups."""
        return len(self.dp_leader_worker_indices)

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """The rank of the leader of a tied group; an `IndexError` where there is no such group."""
        if not 0 <= dp_shard_idx < self.dp_size:
            raise IndexError(f"dp_shard_idx {dp_shard_idx}: this group has {self.dp_size}, 0..{self.dp_size - 1}")
        return self.dp_leader_worker_indices[dp_shard_idx]

    # -- calls --------------------------------------------------------------------------------------------------------

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> ray.ObjectRef[Any]:
        """Call `method_name` on worker `worker_idx` with these keywords."""
        self._check_call(method_name, args)
        plan = dispatch.dispatch_to_one(self._actors.sharding, worker_idx, kwargs)
        reference: ray.ObjectRef[Any] = self._actors._run(method_name, plan).futures[0]
        return reference

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *args: Any,
        run_rank_0_only_axes: list[str] | None = None,
        common_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[ray.ObjectRef[Any]]:
        """Call `method_name` with entry i of each keyword's list on the i-th worker, and `common_kwargs` on all.

        Workers that are not at 0 on `run_rank_0_only_axes` are left out and use up no entry. Lists of other lengths
        than workers are called, and no keyword at all, are a `BatchError`.
        """
        self._check_call(method_name, args, run_rank_0_only_axes)
        plan = dispatch.dispatch_multiple_data(
            self._actors.sharding, kwargs, run_rank_0_only_axes=run_rank_0_only_axes, common_kwargs=common_kwargs
        )
        return self._actors._run(method_name, plan).futures

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: list[str] | None = None, **kwargs: Any
    ) -> list[ray.ObjectRef[Any]]:
        """Call `method_name` with the same keywords on all workers that are at 0 on `run_rank_0_only_axes`."""
        self._check_call(method_name, args, run_rank_0_only_axes)
        plan = dispatch.dispatch_single_data(self._actors.sharding, kwargs, run_rank_0_only_axes)
        return self._actors._run(method_name, plan).futures

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *args: Any,
        in_sharded_axes: list[str] | None = None,
        replicate_on_axes: list[str] | None = None,
        output_is_replicated: list[str] | None = None,
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """Call `method_name` with each worker's share of the keywords: see `WorkerGroup.run_all_workers_sharded_data`.

        What is not returned, because it is replicated, stays with its worker: its future is a None. A `ValueError`
        without sharding annotations.
        """
        self._check_call(method_name, args)
        if self.sharding_annotations is None:
            raise ClusterArgumentError(
                "run_all_workers_sharded_data needs sharding_annotations: give them to the worker group"
            )
        plan = dispatch.dispatch_sharded_data(
            self.sharding_annotations,
            kwargs,
            in_sharded_axes=in_sharded_axes or (),
            replicate_on_axes=replicate_on_axes or (),
            output_is_replicated=output_is_replicated or (),
            make_dummy_calls_to_free_axes=make_dummy_calls_to_free_axes,
            common_kwargs=common_kwargs,
        )
        return self._actors._run(method_name, plan)

    def get_all_worker_results(
        self, future_bundle: MultiWorkerFuture, return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """Wait, at most `deadlines.call` seconds, for the results of those in `return_from_workers`, in that order.

        Where a method yields, all that all workers gave, one worker after the other. With
        `return_generators_as_proxies` nothing is waited for: the references and generators themselves.
        """
        if return_generators_as_proxies:
            return dispatch.keep_results(future_bundle, future_bundle.futures)
        if any(map(is_generator, future_bundle.futures)):
            return self._actors.stream(future_bundle)
        return self._actors.get_all_worker_results(future_bundle)

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False) -> bool:
        """Call `cleanup_method` on all, wait at most `timeout` seconds (None: for ever), then end the workers.

        With `force` they are ended at once. False where one did not end in peace. Idempotent.
        """
        method = None if force or not self._actors.handles else cleanup_method
        return self._actors.shutdown(method, _FOR_EVER if timeout is None else timeout)

    def _check_call(self, method_name: str, args: Sequence[Any], axes: Sequence[str] | None = None) -> None:
        """What is wrong with a call itself reaches no worker."""
        dispatch.refuse_positional(method_name, args)
        self._actors._require_usable(method_name)
        methods = self._actors.described.methods
        if method_name not in methods:
            near = difflib.get_close_matches(method_name, methods, n=1)
            raise AttributeError(
                f"the worker {self._actors.described.name} has no method {method_name!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        if axes and self.sharding_annotations is None:
            raise ClusterArgumentError(
                f"run_rank_0_only_axes={list(axes)} needs sharding_annotations: give them to the worker group"
            )


def _each_alone(cluster: RayVirtualCluster, workers_per_node: int | list[int] | None) -> list[tuple[int, list[int]]]:
    """A tied group of one worker for each bundle that is taken, in rank order."""
    places = cluster.placements()
    room = [0] * len(cluster.get_placement_groups())
    for place in places:
        room[place.group] += 1
    taken = _counts(workers_per_node, room)
    chosen: list[tuple[int, list[int]]] = []
    for place in places:
        if taken[place.group]:
            taken[place.group] -= 1
            chosen.append((place.group, [place.bundle]))
    return chosen


def _counts(workers_per_node: int | list[int] | None, room: list[int]) -> list[int]:
    """How many workers on each node, none more than it has bundles."""
    if workers_per_node is None:
        return list(room)
    if isinstance(workers_per_node, int) and not isinstance(workers_per_node, bool):
        counts = [workers_per_node] * len(room)
    elif isinstance(workers_per_node, list):
        counts = list(workers_per_node)
    else:
        raise ClusterArgumentError(
            f"workers_per_node={workers_per_node!r}: a number, a list with one for each node, or None"
        )
    if len(counts) != len(room) or any(not 0 <= count <= most for count, most in zip(counts, room, strict=True)):
        raise ClusterArgumentError(f"workers_per_node={workers_per_node}: the nodes have {room} bundles")
    return counts


def _checked_sharding(given: NamedSharding | None, workers: int) -> NamedSharding:
    if given is None:
        return NamedSharding(list(range(workers)), ["worker"])
    if sorted(given.layout.ravel().tolist()) != list(range(workers)):
        raise ClusterArgumentError(f"sharding_annotations must hold the ranks 0..{workers - 1} of the workers: {given}")
    return given
