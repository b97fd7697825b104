"""`RayVirtualCluster`: machines and devices shared by worker groups, reserved as Ray placement groups.

Names and semantics follow NeMo-RL. Does not cover ordering GPUs by NVLink, or custom node resources.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlframework.errors import ConfigError, DeadlineExceeded
from rlframework.workers.ports import PortReserver
from rlframework.workers.ray import placement, runtime
from rlframework.workers.ray.placement import ClusterArgumentError, Machine, Placement

_LOG = logging.getLogger(__name__)
MAX_RETRIES_VARIABLE = "NRL_VIRTUAL_CLUSTER_MAX_RETRIES"
"""Environment variable with the number of attempts to find enough resources; 6 if unset."""
_READY_TIMEOUT = 180.0
_REMOVAL_WAIT = 10.0
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class ResourceInsufficientError(ConfigError, RuntimeError):
    """The Ray cluster is too small; the message lists the resources of each node and those requested."""


def init_ray(log_dir: str | Path | None = None) -> None:
    """Connect to Ray until the program ends: keep an existing connection, use RAY_ADDRESS, or start a private Ray.

    `log_dir` is where a private Ray stores its session and logs. Workers do not inherit the driver's environment.
    """
    variable = {} if log_dir is None else {"RAY_TMPDIR": str(Path(log_dir).resolve())}
    with runtime._environment(variable):
        runtime.acquire(0)


class RayVirtualCluster:
    """Bundles of CPUs and GPUs on several nodes, for the workers of one or more groups.

    `bundle_ct_per_node_list` is the number of bundles on each node. A bundle holds one worker of each of the
    `max_colocated_worker_groups` groups that share it: it has `cpus_per_worker` CPUs for each of them, and one GPU with
    `use_gpus`. Resources are reserved by the first `get_placement_groups()` or worker group. By default each node is a
    placement group on a single machine, on different machines if enough are free; with
    `_init_placement_groups(use_unified_pg=True)` one placement group holds all bundles, placed by
    `placement_group_strategy`.

    If the cluster is too small, it is checked again after 1, 2, 4... seconds, `max_retries` times in all (default:
    `NRL_VIRTUAL_CLUSTER_MAX_RETRIES`, or 6); then `ResourceInsufficientError` is raised. If the resources do not become
    free within `ready_timeout` seconds, `DeadlineExceeded` (a `TimeoutError`) is raised and nothing stays reserved.

    Ray is started if needed, see `runtime`. `shutdown` releases everything.
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
        cpus_per_worker: float = 1,
    ) -> None:
        self._placement_groups: list[PlacementGroup] = []
        self._port_reservers: dict[str, Any] = {}
        self._placements: list[Placement] | None = None
        self._used: Counter[tuple[int, int]] = Counter()
        self._counts = _checked_counts(bundle_ct_per_node_list)
        _require(
            not use_gpus or num_gpus_per_node > 0,
            f"num_gpus_per_node={num_gpus_per_node} with use_gpus=True: use at least 1, or set use_gpus=False",
        )
        _require(
            max_colocated_worker_groups > 0,
            f"max_colocated_worker_groups={max_colocated_worker_groups} must be at least 1",
        )
        _check_strategy(placement_group_strategy)
        self.use_gpus = use_gpus
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self.num_gpus_per_node = num_gpus_per_node
        self.name = name
        self._title = f"virtual cluster {name!r}" if name else "virtual cluster"
        self.placement_group_strategy = placement_group_strategy
        self._max_retries = _retries(max_retries)
        self._ready_timeout = ready_timeout
        self._cpus_per_worker = cpus_per_worker

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one bundle."""
        cpus = self._cpus_per_worker * self.max_colocated_worker_groups
        reserved: dict[str, float] = {"CPU": cpus} if cpus else {"memory": 1}  # a bundle must reserve something
        return reserved | ({"GPU": 1} if self.use_gpus else {})

    def world_size(self) -> int:
        """The total number of bundles, and so of workers in a group that uses them all."""
        return sum(self._counts)

    def node_count(self) -> int:
        """The number of nodes with at least one bundle."""
        return sum(count > 0 for count in self._counts)

    def get_placement_groups(self) -> list[PlacementGroup]:
        """The placement groups in the order of the nodes. Reserves them on the first call."""
        if not self._placement_groups:
            self._init_placement_groups()
        return list(self._placement_groups)

    def placements(self) -> list[Placement]:
        """The placement of each rank in a group that uses all bundles. The ranks of a node are consecutive."""
        if self._placements is None:
            of_bundles = [placement_group_table(group)["bundles_to_node_id"] for group in self.get_placement_groups()]
            self._placements = placement.rank_placements(
                [[nodes[bundle] for bundle in sorted(nodes)] for nodes in of_bundles],
                {machine.node_id: machine.address for machine in machines()},
            )
        return list(self._placements)

    def get_master_address_and_port(self) -> tuple[str, int]:
        """An address of rank 0's machine, and a port there that is reserved until `shutdown`; see `ports`."""
        first = self.placements()[0]
        return self.get_available_address_and_port(first.group, first.bundle)

    def get_available_address_and_port(self, pg_idx: int, bundle_idx: int) -> tuple[str, int]:
        """The same for the machine of another bundle. Loopback if all bundles are on one machine."""
        placements = {(each.group, each.bundle): each for each in self.placements()}
        if (pg_idx, bundle_idx) not in placements:
            raise IndexError(
                f"no bundle {bundle_idx} in placement group {pg_idx}; available (group, bundle) pairs: "
                f"{sorted(placements)}"
            )
        placed = placements[pg_idx, bundle_idx]
        if placed.node_id not in self._port_reservers:
            there = NodeAffinitySchedulingStrategy(placed.node_id, soft=False)
            reserver = ray.remote(PortReserver).options(num_cpus=0, scheduling_strategy=there).remote()
            self._port_reservers[placed.node_id] = reserver
        address = self.address_of(placed)
        port = self._port_reservers[placed.node_id].reserve.remote(address)
        return address, int(ray.get(port, timeout=self._ready_timeout))

    def address_of(self, placed: Placement) -> str:
        """The address at which other workers reach a worker placed there: loopback if all are on one machine."""
        return placed.address if len({other.node_id for other in self.placements()}) > 1 else "127.0.0.1"

    # -- users --------------------------------------------------------------------------------------------------------

    def claim(self, bundles: Sequence[tuple[int, int]], name: str) -> None:
        """Register a worker group, called `name` in messages, on these (placement group, bundle) pairs.

        Raises `ClusterArgumentError` if more than `max_colocated_worker_groups` groups would share a bundle, because
        its workers would never start.
        """
        claimed = self._used + Counter(bundles)
        full = sorted(bundle for bundle in bundles if claimed[bundle] > self.max_colocated_worker_groups)
        if full:
            raise ClusterArgumentError(
                f"{name}: bundle {full[0][1]} of placement group {full[0][0]} already has all "
                f"{self.max_colocated_worker_groups} worker group(s) that it can hold: shut one down, or create the "
                "cluster with a larger max_colocated_worker_groups"
            )
        self._used = claimed

    def release_claim(self, bundles: Sequence[tuple[int, int]]) -> None:
        """Unregister a worker group from these (placement group, bundle) pairs."""
        self._used = self._used - Counter(bundles)

    # -- reserving ----------------------------------------------------------------------------------------------------

    def _init_placement_groups(self, strategy: str | None = None, use_unified_pg: bool = False) -> list[PlacementGroup]:
        """Reserve all bundles once. `strategy` is that of the unified group (default: the cluster's strategy)."""
        if self._placement_groups:
            return list(self._placement_groups)
        strategy = self.placement_group_strategy if strategy is None else strategy
        _check_strategy(strategy)
        runtime.acquire(id(self))
        try:
            self._wait_for_capacity(use_unified_pg)
            self._placement_groups = self._reserve(strategy, use_unified_pg)
            self._wait_until_ready()
        except BaseException:
            self.shutdown()
            raise
        return list(self._placement_groups)

    def _wait_for_capacity(self, unified: bool) -> None:
        for attempt in range(self._max_retries):
            found = machines()
            reason = placement.capacity_shortfall(self._counts, self.bundle, found, unified=unified)
            if not reason:
                return
            if attempt + 1 < self._max_retries:
                _LOG.warning("%s: %s; checking again in %d s", self._title, reason, 2**attempt)
                time.sleep(2**attempt)
        raise ResourceInsufficientError(
            f"Maximum number of retries reached ({self._max_retries}). {self._request_text()}: {reason}.\n"
            f"The Ray cluster has\n{placement.describe_machines(found, list(self.bundle))}\n"
            "Request fewer workers or nodes, or add nodes to the cluster"
        )

    def _reserve(self, strategy: str, unified: bool) -> list[PlacementGroup]:
        if unified:
            bundles = [self.bundle] * self.world_size()
            return [placement_group(bundles, strategy=strategy, name=self._unique_name("all"))]
        counts = [count for count in self._counts if count]
        nodes = placement.assign(counts, self.bundle, machines())
        groups = []
        for index, count in enumerate(counts):
            selector = None if nodes is None else [{"ray.io/node-id": nodes[index]}] * count
            name, bundles = self._unique_name(f"node{index}"), [self.bundle] * count
            groups.append(placement_group(bundles, strategy="STRICT_PACK", name=name, bundle_label_selector=selector))
        return groups

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + self._ready_timeout
        missing = self._placement_groups
        while missing and time.monotonic() < until:  # short waits, because an interrupt is only handled between them
            missing = [group for group in missing if not group.wait(1)]
        if missing:
            raise DeadlineExceeded(
                f"{self._request_text()}: {len(missing)} of {len(self._placement_groups)} placement groups were not "
                f"ready within {self._ready_timeout:g} s, because the cluster is in use. It has\n"
                f"{placement.describe_machines(machines(), list(self.bundle))}\n"
                "All reservations were released. End the programs that use the cluster, request fewer bundles, or "
                "raise ready_timeout"
            )

    # -- shutdown -----------------------------------------------------------------------------------------------------

    def shutdown(self) -> bool:
        """Release placement groups, which ends everything that still runs on them, and ports. Idempotent.

        Returns False if Ray did not confirm this in time.
        """
        gone = True
        if ray.is_initialized():
            for reserver in self._port_reservers.values():
                ray.kill(reserver)
            for group in self._placement_groups:
                remove_placement_group(group)
            gone = runtime.poll(self._placement_groups, _is_removed, _REMOVAL_WAIT)
        self._port_reservers, self._placement_groups, self._placements = {}, [], None
        self._used.clear()
        runtime.release(id(self))
        return gone

    def __del__(self) -> None:
        if getattr(self, "_placement_groups", None):
            with contextlib.suppress(Exception):  # Python or Ray is shutting down, which releases them anyway
                self.shutdown()

    def _request_text(self) -> str:
        each = ", ".join(f"node {index}: {count}" for index, count in enumerate(self._counts))
        total = {name: amount * self.world_size() for name, amount in self.bundle.items()}
        return (
            f"{self._title} requests bundles of {placement.describe(self.bundle)} ({each}), in total "
            f"{placement.describe(total)}"
        )

    def _unique_name(self, part: str) -> str:
        return f"{self.name or 'rlframework'}-{part}-{os.getpid()}-{id(self):x}"


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ClusterArgumentError(message)


def _checked_counts(counts: Sequence[int]) -> list[int]:
    _require(
        all(type(count) is int and count >= 0 for count in counts) and sum(counts) > 0,
        f"bundle_ct_per_node_list={counts!r} must be a list with the number of bundles on each node, at least one in "
        "total",
    )
    return list(counts)


def _check_strategy(strategy: str) -> None:
    _require(
        strategy in _STRATEGIES,
        f"placement_group_strategy={strategy!r} is unknown: use one of {', '.join(_STRATEGIES)}",
    )


def _retries(given: int | None) -> int:
    source, text = "max_retries", str(given)
    if given is None:
        source, text = MAX_RETRIES_VARIABLE, os.environ.get(MAX_RETRIES_VARIABLE, "6")
    _require(text.isdigit() and int(text) > 0, f"{source}={text} must be a positive integer")
    return int(text)


def machines() -> list[Machine]:
    """The live nodes of the Ray cluster."""
    free = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        Machine(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["NodeManagerHostname"],
            node["Resources"],
            free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


def _is_removed(group: PlacementGroup) -> bool:
    return placement_group_table(group).get("state") in ("REMOVED", None)
