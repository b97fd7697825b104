"""`RayWorkerGroup`: workers of one class on the bundles of a `RayVirtualCluster`, called together.

Names, arguments and defaults follow NeMo-RL, with these differences: `run_*` calls work without sharding annotations
unless they need them; a failure is reported with rank, node and the worker's own traceback, and ends the group; workers
get only the named variables of the driver's environment. `worker_group.name=ray` uses its base,
`remote_group.RayRemoteWorkerGroup`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlframework.config.sections import DeadlinesConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import MultiWorkerFuture
from rlframework.workers import dispatch
from rlframework.workers.ray.actor_group import ActorGroup, WorkerAssignment, is_generator
from rlframework.workers.ray.virtual_cluster import ClusterArgumentError, RayVirtualCluster
from rlframework.workers.ray.worker_builder import RayWorkerBuilder

if TYPE_CHECKING:
    import ray
    from ray.actor import ActorHandle

__all__ = ["MultiWorkerFuture", "RayWorkerBuilder", "RayWorkerGroup"]

_NO_TIMEOUT = 3e8
"""In seconds: about ten years."""


class RayWorkerGroup:
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
        self._env_vars = dict(env_vars or {})
        self._runtime_env = dict(runtime_env or {})
        self._deadlines = deadlines or DeadlinesConfig()
        self.dp_leader_worker_indices: list[int] = []
        self._metadata: list[dict[str, Any]] = []
        chosen = (
            _one_worker_per_bundle(cluster, workers_per_node) if bundle_indices_list is None else bundle_indices_list
        )
        self._create_workers_from_bundle_indices(remote_worker_builder, chosen)

    def _create_workers_from_bundle_indices(
        self, remote_worker_builder: RayWorkerBuilder, bundle_indices_list: Sequence[tuple[int, list[int]]]
    ) -> None:
        """Start a worker on each bundle of each tied group; return when all are constructed."""
        assignments = self._assign_workers(bundle_indices_list)
        self._actors = ActorGroup(
            self.cluster,
            remote_worker_builder,
            assignments,
            sharding=_checked_sharding(self.sharding_annotations, len(assignments)),
            deadlines=self._deadlines,
            environment=self._env_vars,
            runtime_env=self._runtime_env,
            named=bool(self.name_prefix),
        )

    def _assign_workers(self, bundle_indices_list: Sequence[tuple[int, list[int]]]) -> list[WorkerAssignment]:
        """Assign workers to bundles, and record their metadata and the leaders."""
        placements = {(each.group, each.bundle): each for each in self.cluster.placements()}
        self._metadata, self.dp_leader_worker_indices = [], []
        assignments: list[WorkerAssignment] = []
        for group, (node, bundles) in enumerate(bundle_indices_list):
            for tied_rank, bundle in enumerate(bundles):
                if (node, bundle) not in placements:
                    raise ClusterArgumentError(
                        f"no bundle {bundle} on node {node}; available (node, bundle) pairs: {sorted(placements)}"
                    )
                tied = (node, list(bundles)) if tied_rank == 0 else None
                suffix = f"{node}-{bundle}" if len(bundles) == 1 else f"grp{group}-{tied_rank}"
                name = f"{self.name_prefix}-{suffix}"
                assignments.append(WorkerAssignment(placements[node, bundle], group, tied_rank, tied, name))
                self._record_metadata(assignments[-1], len(assignments) - 1)
        if not assignments:
            raise ClusterArgumentError("a worker group needs at least one worker: select at least one bundle")
        return assignments

    def _record_metadata(self, assignment: WorkerAssignment, rank: int) -> None:
        if assignment.tied_rank == 0:
            self.dp_leader_worker_indices.append(rank)
        self._metadata.append(
            {
                "node_idx": assignment.placement.group,
                "local_rank": assignment.tied_rank,
                "global_rank": rank,
                "name": assignment.name,
                "bundle_indices": assignment.bundles,
                "dp_shard_idx": assignment.tied_group,
            }
        )

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[ActorHandle[Any]]:
        """The handles of the workers by rank; empty after the group has ended."""
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
        """The rank of the leader of a tied group; raises `IndexError` if there is no such group."""
        if not 0 <= dp_shard_idx < self.dp_size:
            raise IndexError(f"no dp_shard_idx {dp_shard_idx} in {self.dp_size} tied groups: use 0..{self.dp_size - 1}")
        return self.dp_leader_worker_indices[dp_shard_idx]

    # -- calls --------------------------------------------------------------------------------------------------------

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> ray.ObjectRef[Any]:
        """Call `method_name` on worker `worker_idx` with these keyword arguments."""
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
        """Call `method_name` on the i-th worker with entry i of each keyword's list; all workers get `common_kwargs`.

        Workers that are not at coordinate 0 on `run_rank_0_only_axes` are skipped and take no entry. Raises
        `BatchError` if the length of a list differs from the number of called workers, and if there are no keywords.
        """
        self._check_call(method_name, args, run_rank_0_only_axes)
        plan = dispatch.dispatch_multiple_data(
            self._actors.sharding, kwargs, run_rank_0_only_axes=run_rank_0_only_axes, common_kwargs=common_kwargs
        )
        return self._actors._run(method_name, plan).futures

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: list[str] | None = None, **kwargs: Any
    ) -> list[ray.ObjectRef[Any]]:
        """Call `method_name` with the same arguments on all workers at coordinate 0 on `run_rank_0_only_axes`."""
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
        """Call `method_name` on each worker with its shard: see `WorkerGroup.run_all_workers_sharded_data`.

        Replicated results that are not returned are not transferred either: their futures resolve to None. Raises
        `ValueError` without sharding annotations.
        """
        self._check_call(method_name, args)
        if self.sharding_annotations is None:
            raise ClusterArgumentError(
                "run_all_workers_sharded_data needs sharding_annotations: pass them to the worker group's constructor"
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
        """Wait at most `deadlines.call` seconds for the results of `return_from_workers`, in that order.

        If the method yields, return the items of all workers, concatenated. With `return_generators_as_proxies`, return
        the references and generators themselves without waiting.
        """
        if return_generators_as_proxies:
            return dispatch.select_results(future_bundle, future_bundle.futures)
        if any(map(is_generator, future_bundle.futures)):
            return self._actors.stream(future_bundle)
        return self._actors.get_all_worker_results(future_bundle)

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False) -> bool:
        """Call `cleanup_method` on all workers, wait at most `timeout` seconds (None: no limit), then end them.

        With `force`, end them immediately. Returns False if a worker did not end cleanly. Idempotent.
        """
        method = None if force or not self._actors.handles else cleanup_method
        return self._actors.shutdown(method, _NO_TIMEOUT if timeout is None else timeout)

    def _check_call(self, method_name: str, args: Sequence[Any], axes: Sequence[str] | None = None) -> None:
        """Reject an invalid call before it reaches a worker."""
        dispatch.reject_positional(method_name, args)
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
                f"run_rank_0_only_axes={list(axes)} needs sharding_annotations: pass them to the worker group's "
                "constructor"
            )


def _one_worker_per_bundle(
    cluster: RayVirtualCluster, workers_per_node: int | list[int] | None
) -> list[tuple[int, list[int]]]:
    """A tied group of one worker for each used bundle, in rank order."""
    placements = cluster.placements()
    bundles = [0] * len(cluster.get_placement_groups())
    for placement in placements:
        bundles[placement.group] += 1
    remaining = _counts(workers_per_node, bundles)
    selected: list[tuple[int, list[int]]] = []
    for placement in placements:
        if remaining[placement.group]:
            remaining[placement.group] -= 1
            selected.append((placement.group, [placement.bundle]))
    return selected


def _counts(workers_per_node: int | list[int] | None, bundles: list[int]) -> list[int]:
    """The number of workers on each node, at most its number of bundles."""
    if workers_per_node is None:
        return list(bundles)
    if isinstance(workers_per_node, int) and not isinstance(workers_per_node, bool):
        counts = [workers_per_node] * len(bundles)
    elif isinstance(workers_per_node, list):
        counts = list(workers_per_node)
    else:
        raise ClusterArgumentError(
            f"workers_per_node={workers_per_node!r} must be a number, a list with one number per node, or None"
        )
    if len(counts) != len(bundles) or any(not 0 <= count <= most for count, most in zip(counts, bundles, strict=True)):
        raise ClusterArgumentError(
            f"workers_per_node={workers_per_node} does not fit: the nodes have {bundles} bundles"
        )
    return counts


def _checked_sharding(given: NamedSharding | None, workers: int) -> NamedSharding:
    if given is None:
        return NamedSharding(list(range(workers)), ["worker"])
    if sorted(given.layout.ravel().tolist()) != list(range(workers)):
        raise ClusterArgumentError(f"sharding_annotations must hold the ranks 0..{workers - 1} once each, got {given}")
    return given
