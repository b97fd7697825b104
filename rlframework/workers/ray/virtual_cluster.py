"""`RayVirtualCluster`: the machines and devices that worker groups share, reserved as placement groups of Ray.

Names and meaning follow NeMo-RL. It leaves out the order of GPUs by NVLink, and custom resources of nodes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.errors import ConfigError, DeadlineExceeded
from rlframework.workers.ports import PortKeeper
from rlframework.workers.ray import placement, runtime
from rlframework.workers.ray.placement import Machine, Placement

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_LOG = logging.getLogger(__name__)
MAX_RETRIES_VARIABLE = "NRL_VIRTUAL_CLUSTER_MAX_RETRIES"
"""The environment variable that says how often a cluster that is too small is asked again; 6 without it."""
_READY_TIMEOUT = 180.0
_REMOVAL_WAIT = 10.0
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class ClusterArgumentError(ConfigError, ValueError, AssertionError):
    """A virtual cluster or a worker group was asked for what makes no sense."""


class ResourceInsufficientError(ConfigError, RuntimeError):
    """The Ray cluster is too small; the message says what it has, node by node, and what was asked."""


def init_ray(log_dir: str | Path | None = None) -> None:
    """Have a Ray until this program ends: the one that is there (connected to, or at RAY_ADDRESS), or a private one.

    `log_dir` is where Ray keeps its session and logs when one is started here. Nothing of the environment is passed on.
    """
    variable = {} if log_dir is None else {"RAY_TMPDIR": str(Path(log_dir).resolve())}
    with runtime._environment(variable):
        runtime.acquire(0)


class RayVirtualCluster:
    """Bundles of CPU and GPU on several nodes, for the workers of one or more groups.

    `bundle_ct_per_node_list` says how many bundles each node gives; a bundle is the place of one worker of each of the
    `max_colocated_worker_groups` groups that share it: as many CPUs as groups, and one GPU with `use_gpus`. Nothing is
    reserved before the first `get_placement_groups()` or group of workers. By default there is one placement group
    for each node, all of it on one machine, and different ones as far as there are free ones; with
    `_init_placement_groups(use_unified_pg=True)` one for all bundles, by `placement_group_strategy`.

    A cluster that is too small is asked again after 1, 2, 4... seconds, at most `max_retries` times in all
    (default: `NRL_VIRTUAL_CLUSTER_MAX_RETRIES`, or 6), and then is a `ResourceInsufficientError`; what does not become
    free within `ready_timeout` seconds is a `DeadlineExceeded` (a `TimeoutError`), and nothing stays reserved.

    Ray is started if need be, see `runtime`. `shutdown` gives all of it back.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: Sequence[int],
        use_gpus: bool = True,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int = 8,
        name: str = "",
        placement_group_strategy: str = "SPREAD",
        *,
        max_retries: int | None = None,
        ready_timeout: float = _READY_TIMEOUT,
    ) -> None:
        self._placement_groups: list[PlacementGroup] = []
        self._keepers: dict[str, Any] = {}
        self._placements: list[Placement] | None = None
        self._used: Counter[tuple[int, int]] = Counter()
        self._counts = _checked_counts(bundle_ct_per_node_list)
        if use_gpus and num_gpus_per_node <= 0:
            raise ClusterArgumentError(
                f"num_gpus_per_node={num_gpus_per_node} with use_gpus=True: give at least 1, or set use_gpus=False"
            )
        if max_colocated_worker_groups < 1:
            raise ClusterArgumentError(f"max_colocated_worker_groups={max_colocated_worker_groups}: at least 1")
        _check_strategy(placement_group_strategy)
        self.use_gpus = use_gpus
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self.num_gpus_per_node = num_gpus_per_node
        self.name = name
        self.placement_group_strategy = placement_group_strategy
        self._max_retries = _retries(max_retries)
        self._ready_timeout = ready_timeout

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one bundle."""
        return {"CPU": self.max_colocated_worker_groups, **({"GPU": 1} if self.use_gpus else {})}

    def world_size(self) -> int:
        """Bundles in all, and so the workers of a group that takes all."""
        return sum(self._counts)

    def node_count(self) -> int:
        """Nodes that give a bundle."""
        return sum(count > 0 for count in self._counts)

    def get_placement_groups(self) -> list[PlacementGroup]:
        """The placement groups, in the order of the nodes; reserved now if they are not yet."""
        if not self._placement_groups:
            self._init_placement_groups()
        return list(self._placement_groups)

    def placements(self) -> list[Placement]:
        """Where each rank of a group that takes all bundles stands: the ranks of a node follow each other."""
        if self._placements is None:
            self._placements = placement.in_rank_order(
                [_nodes_of(group) for group in self.get_placement_groups()], _addresses()
            )
        return list(self._placements)

    def get_master_address_and_port(self) -> tuple[str, int]:
        """An address of the machine of rank 0, and a port there that is kept free until `shutdown`; see `ports`."""
        first = self.placements()[0]
        return self.get_available_address_and_port(first.group, first.bundle)

    def get_available_address_and_port(self, pg_idx: int, bundle_idx: int) -> tuple[str, int]:
        """The same for the machine of another bundle. Loopback where all bundles are on one machine."""
        import ray

        where = {(place.group, place.bundle): place for place in self.placements()}
        if (pg_idx, bundle_idx) not in where:
            raise IndexError(f"no bundle {bundle_idx} in placement group {pg_idx}; there are {sorted(where)}")
        address = self.address_of(where[pg_idx, bundle_idx])
        keeper = self._keeper(where[pg_idx, bundle_idx].node_id)
        return address, int(ray.get(keeper.keep.remote(address), timeout=self._ready_timeout))

    def address_of(self, place: Placement) -> str:
        """The address at which the other workers reach `place`: loopback where all bundles are on one machine."""
        return place.address if len({other.node_id for other in self.placements()}) > 1 else "127.0.0.1"

    # -- who uses it --------------------------------------------------------------------------------------------------

    def claim(self, places: Sequence[tuple[int, int]], what: str) -> None:
        """Note that a group, called `what` in messages, has workers on these (placement group, bundle) places.

        A `ClusterArgumentError` where more groups than `max_colocated_worker_groups` would share a bundle: its workers
        would wait for ever.
        """
        wanted = self._used + Counter(places)
        full = sorted(place for place in places if wanted[place] > self.max_colocated_worker_groups)
        if full:
            raise ClusterArgumentError(
                f"{what}: bundle {full[0][1]} of placement group {full[0][0]} is for "
                f"{self.max_colocated_worker_groups} worker group(s), and they are there: shut one down, or make the "
                "cluster with a larger max_colocated_worker_groups"
            )
        self._used = wanted

    def unclaim(self, places: Sequence[tuple[int, int]]) -> None:
        """The workers on these places are gone."""
        self._used = self._used - Counter(places)

    # -- reserving ----------------------------------------------------------------------------------------------------

    def _init_placement_groups(self, strategy: str | None = None, use_unified_pg: bool = False) -> list[PlacementGroup]:
        """Reserve all bundles, once. `strategy` is that of the unified group (default: the cluster's own)."""
        if self._placement_groups:
            return list(self._placement_groups)
        strategy = self.placement_group_strategy if strategy is None else strategy
        _check_strategy(strategy)
        runtime.acquire(id(self))
        try:
            self._wait_for_room(use_unified_pg)
            self._placement_groups = self._reserve(strategy, use_unified_pg)
            self._wait_until_ready()
        except BaseException:
            self.shutdown()
            raise
        return list(self._placement_groups)

    def _wait_for_room(self, unified: bool) -> None:
        for attempt in range(self._max_retries):
            machines = _machines()
            reason = placement.lacking(self._counts, self.bundle, machines, unified=unified)
            if not reason:
                return
            if attempt + 1 < self._max_retries:
                _LOG.warning("%s: %s; looking again in %d s", self._title(), reason, 2**attempt)
                time.sleep(2**attempt)
        raise ResourceInsufficientError(
            f"Maximum number of retries reached ({self._max_retries}). {self._asked()}: {reason}.\n"
            f"The Ray cluster has\n{placement.describe_machines(machines, list(self.bundle))}\n"
            "Ask for fewer workers or nodes, or add nodes to the cluster"
        )

    def _reserve(self, strategy: str, unified: bool) -> list[PlacementGroup]:
        from ray.util.placement_group import placement_group

        if unified:
            bundles = [self.bundle for _ in range(self.world_size())]
            return [placement_group(bundles, strategy=strategy, name=self._unique_name("all"))]
        counts = [count for count in self._counts if count]
        nodes = placement.assign(counts, self.bundle, _machines())
        return [
            placement_group(
                [self.bundle for _ in range(count)],
                strategy="STRICT_PACK",
                name=self._unique_name(f"node{index}"),
                bundle_label_selector=None if nodes is None else [{"ray.io/node-id": nodes[index]}] * count,
            )
            for index, count in enumerate(counts)
        ]

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + self._ready_timeout
        missing = self._placement_groups
        while missing and time.monotonic() < until:  # in short waits: an interrupt is seen between them only
            missing = [group for group in missing if not group.wait(1)]
        if missing:
            raise DeadlineExceeded(
                f"{self._asked()}: {len(missing)} of {len(self._placement_groups)} placement groups were not ready "
                f"within {self._ready_timeout:g} s, because others use the cluster, which has\n"
                f"{placement.describe_machines(_machines(), list(self.bundle))}\n"
                "What was reserved is given back. End what uses it, ask for less, or raise ready_timeout"
            )

    def _keeper(self, node_id: str) -> Any:
        """The actor that keeps the ports of a machine."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node_id not in self._keepers:
            self._keepers[node_id] = (
                ray.remote(PortKeeper)
                .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
                .remote()
            )
        return self._keepers[node_id]

    # -- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self) -> bool:
        """Give everything back: placement groups, and with them whatever still runs there, and ports. Idempotent.

        False where Ray did not confirm it in time.
        """
        import ray

        gone = True
        if ray.is_initialized():
            for keeper in self._keepers.values():
                ray.kill(keeper)
            gone = _remove(self._placement_groups)
        self._keepers, self._placement_groups, self._placements = {}, [], None
        self._used.clear()
        runtime.release(id(self))
        return gone

    def __del__(self) -> None:
        if getattr(self, "_placement_groups", None):
            with contextlib.suppress(Exception):  # Python or Ray is on its way out, and takes them along
                self.shutdown()

    def _title(self) -> str:
        return f"virtual cluster {self.name!r}" if self.name else "virtual cluster"

    def _asked(self) -> str:
        each = ", ".join(f"node {index}: {count}" for index, count in enumerate(self._counts))
        total = {name: amount * self.world_size() for name, amount in self.bundle.items()}
        return (
            f"{self._title()} asks for bundles of {placement.describe(self.bundle)} ({each}), in all "
            f"{placement.describe(total)}"
        )

    def _unique_name(self, part: str) -> str:
        return f"{self.name or 'rlframework'}-{part}-{os.getpid()}-{id(self):x}"


def _checked_counts(counts: Sequence[int]) -> list[int]:
    whole = not isinstance(counts, (str, bytes)) and all(
        isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts
    )
    if not whole or not sum(counts):
        raise ClusterArgumentError(
            f"bundle_ct_per_node_list={counts!r}: a list with the number of bundles of each node, at least one in all"
        )
    return list(counts)


def _check_strategy(strategy: str) -> None:
    if strategy not in _STRATEGIES:
        raise ClusterArgumentError(f"placement_group_strategy={strategy!r}: one of {', '.join(_STRATEGIES)}")


def _retries(given: int | None) -> int:
    text = os.environ.get(MAX_RETRIES_VARIABLE, "6") if given is None else str(given)
    if not text.isdigit() or int(text) < 1:
        what = MAX_RETRIES_VARIABLE if given is None else "max_retries"
        raise ClusterArgumentError(f"{what}={text}: a whole number of at least 1")
    return int(text)


def _machines() -> list[Machine]:
    """The living nodes of the Ray cluster."""
    import ray

    free = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        Machine(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


def _addresses() -> dict[str, str]:
    return {machine.node_id: machine.address for machine in _machines()}


def _nodes_of(group: PlacementGroup) -> list[str]:
    """The machine of each bundle."""
    from ray.util.placement_group import placement_group_table

    where = placement_group_table(group)["bundles_to_node_id"]
    return [where[bundle] for bundle in sorted(where)]


def _remove(groups: Sequence[PlacementGroup]) -> bool:
    """Remove placement groups and wait until Ray says that they are gone."""
    from ray.util.placement_group import placement_group_table, remove_placement_group

    for group in groups:
        remove_placement_group(group)
    until = time.monotonic() + _REMOVAL_WAIT
    left = list(groups)
    while left and time.monotonic() < until:
        left = [group for group in left if placement_group_table(group).get("state") not in ("REMOVED", None)]
        time.sleep(0.02 if left else 0)
    return not left
