"""`RayVirtualCluster`: machines and devices shared by worker groups, reserved as Ray placement groups.

Names and semantics follow NeMo-RL. Does not cover ordering GPUs by NVLink, or custom node resources.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlframework.base.errors import ConfigError, DeadlineExceeded
from rlframework.base.logs import plugin_logger
from rlframework.workers.machine import PortReserver
from rlframework_ray import placement, runtime
from rlframework_ray.placement import ClusterArgumentError, Machine, Placement

_LOG = plugin_logger(__name__)
MAX_RETRIES_VARIABLE = "NRL_VIRTUAL_CLUSTER_MAX_RETRIES"
"""Environment variable with the number of attempts to find enough resources; 6 if unset."""
_REMOVAL_WAIT = 10.0
_SETTLING = 5.0
"""Seconds to wait until Ray counts released resources as free, which usually takes 0.2 s."""
_PATIENCE = 5.0
"""Seconds of a wait for resources after which it is reported."""
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class ResourceInsufficientError(ConfigError, RuntimeError):
    """The Ray cluster is too small; the message lists the resources of each node and those requested."""


def init_ray(log_dir: str | Path | None = None) -> None:
    """Connect to Ray until the program ends: keep an existing connection, use RAY_ADDRESS, or start a private Ray.

    `log_dir` is where a private Ray stores its session and logs, which stay. Workers do not inherit the driver's
    environment.
    """
    runtime.acquire(0, log_dir=None if log_dir is None else Path(log_dir))


class RayVirtualCluster:
    """Bundles of CPUs and GPUs on several nodes, for the workers of one or more groups.

    `bundle_ct_per_node_list` is the number of bundles on each node. A bundle holds one worker of each of the
    `max_colocated_worker_groups` groups that share it: it has `cpus_per_worker` CPUs for each of them, and
    `gpus_per_bundle` GPUs with `use_gpus`. The first `get_placement_groups()` or worker group starts Ray if needed
    and reserves resources, which `shutdown` releases. By default each node is a placement group on a single
    machine, on different machines if enough are free within five seconds; with
    `_init_placement_groups(use_unified_pg=True)` one placement group holds all bundles, placed by
    `placement_group_strategy`.

    If the cluster is too small, it is checked again after 1, 2, 4... seconds, `max_retries` times in all (default:
    `NRL_VIRTUAL_CLUSTER_MAX_RETRIES`, or 6); then `ResourceInsufficientError` is raised. If the resources do not become
    free within `ready_timeout` seconds, `DeadlineExceeded` (a `TimeoutError`) is raised and nothing stays reserved.
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
        ready_timeout: float = 180.0,
        cpus_per_worker: float = 1,
        gpus_per_bundle: int = 1,
        advice: str = "End the programs that use the cluster, request fewer bundles, or raise ready_timeout",
    ) -> None:
        """`advice`: the end of the message of `DeadlineExceeded`, with what to do."""
        self._placement_groups: list[PlacementGroup] = []
        self._port_reservers: dict[str, Any] = {}
        self._placements: list[Placement] = []
        self.groups: weakref.WeakSet[Any] = weakref.WeakSet()
        counts, self._max_retries = bundle_ct_per_node_list, _retries(max_retries)
        _require(
            all(type(count) is int and count >= 0 for count in counts) and sum(counts) > 0,
            f"bundle_ct_per_node_list={counts!r} must be a list with the number of bundles on each node, at least one "
            "in total",
        )
        _require(
            not use_gpus or num_gpus_per_node > 0,
            f"num_gpus_per_node={num_gpus_per_node} with use_gpus=True: use at least 1, or set use_gpus=False",
        )
        most, strategy = max_colocated_worker_groups, placement_group_strategy
        _require(most > 0, f"max_colocated_worker_groups={most} must be at least 1")
        known = ", ".join(_STRATEGIES)
        _require(strategy in _STRATEGIES, f"placement_group_strategy={strategy!r} is unknown: use one of {known}")
        self._counts = list(counts)
        self.use_gpus = use_gpus
        self.max_colocated_worker_groups = most
        self.num_gpus_per_node = num_gpus_per_node
        self.name = name
        self.placement_group_strategy = strategy
        self._title = f"virtual cluster {name!r}" if name else "virtual cluster"
        self._ready_timeout, self._advice = ready_timeout, advice
        self._cpus_per_worker = cpus_per_worker
        self.gpus_per_bundle = gpus_per_bundle

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one bundle."""
        cpus = self._cpus_per_worker * self.max_colocated_worker_groups
        reserved: dict[str, float] = {"CPU": cpus} if cpus else {"memory": 1}  # a bundle must reserve something
        return reserved | ({"GPU": self.gpus_per_bundle} if self.use_gpus else {})

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
        if not self._placements:
            of_bundles = [placement_group_table(group)["bundles_to_node_id"] for group in self.get_placement_groups()]
            self._placements = placement.rank_placements(
                [[nodes[bundle] for bundle in sorted(nodes)] for nodes in of_bundles],
                {machine.node_id: machine.address for machine in machines()},
            )
        return list(self._placements)

    def get_master_address_and_port(self) -> tuple[str, int]:
        """An address of rank 0's machine, and a port there that is reserved until `shutdown`."""
        first = self.placements()[0]
        return self.get_available_address_and_port(first.group, first.bundle)

    def get_available_address_and_port(self, pg_idx: int, bundle_idx: int) -> tuple[str, int]:
        """The same for the machine of another bundle. Loopback if all bundles are on one machine."""
        places = {(each.group, each.bundle): each for each in self.placements()}
        place = places.get((pg_idx, bundle_idx))
        if place is None:
            raise IndexError(f"no bundle {bundle_idx} in placement group {pg_idx}; available pairs: {sorted(places)}")
        if place.node_id not in self._port_reservers:
            there = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
            reserver = ray.remote(PortReserver).options(num_cpus=0, scheduling_strategy=there).remote()
            self._port_reservers[place.node_id] = reserver
        address = self.address_of(place)
        port = self._port_reservers[place.node_id].reserve.remote(address)
        return address, int(ray.get(port, timeout=self._ready_timeout))

    def address_of(self, placed: Placement) -> str:
        """The address at which other workers reach a worker placed there: loopback if all are on one machine."""
        return placed.address if len({other.node_id for other in self.placements()}) > 1 else "127.0.0.1"

    def _init_placement_groups(self, strategy: str | None = None, use_unified_pg: bool = False) -> list[PlacementGroup]:
        """Reserve all bundles once. `strategy` is that of the unified group (default: the cluster's strategy)."""
        if self._placement_groups:
            return list(self._placement_groups)
        runtime.acquire(id(self))
        try:
            self._wait_for_capacity(use_unified_pg)
            until = time.monotonic() + self._ready_timeout
            self._placement_groups = self._reserve(strategy or self.placement_group_strategy, use_unified_pg)
            self._wait_until_ready(until)
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
                _LOG.warning("The %s: %s; checking again in %d s", self._title, reason, 2**attempt)
                time.sleep(2**attempt)
        raise ResourceInsufficientError(
            f"Maximum number of retries reached ({self._max_retries}): {reason}. {self.resources_text()}\n"
            "Request fewer workers or nodes, or add nodes to the cluster"
        )

    def _reserve(self, strategy: str, unified: bool) -> list[PlacementGroup]:
        if unified:
            return [placement_group([self.bundle] * self.world_size(), strategy=strategy)]
        counts = [count for count in self._counts if count]
        nodes = self._assign(counts)
        groups = []
        for index, count in enumerate(counts):
            selector = None if nodes is None else [{"ray.io/node-id": nodes[index]}] * count
            bundles = [self.bundle] * count
            groups.append(placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=selector))
        return groups

    def _assign(self, counts: list[int]) -> list[str] | None:
        """The machine of each group. Waits a little while fewer machines are free than if the cluster were idle.

        Ray still counts resources as used for a moment after it has confirmed their release.
        """
        until = time.monotonic() + min(_SETTLING, self._ready_timeout / 2)
        while True:
            found = machines()
            nodes = placement.assign(counts, self.bundle, found)
            idle = placement.assign(counts, self.bundle, [replace(machine, free=machine.total) for machine in found])
            if len(counts) == 1 or len(set(nodes or ())) >= len(set(idle or ())) or time.monotonic() > until:
                return nodes
            time.sleep(0.05)

    def _wait_until_ready(self, until: float) -> None:
        missing, reported = self._placement_groups, time.monotonic() + _PATIENCE
        while missing and time.monotonic() < until:  # short waits, because an interrupt is only handled between them
            missing = [group for group in missing if not group.wait(1)]
            if missing and time.monotonic() > reported:
                left = until - time.monotonic()
                _LOG.warning("Waiting up to %d s for resources or further nodes. %s", left, self.resources_text())
                reported = until
        if missing:
            raise DeadlineExceeded(
                f"{len(missing)} of {len(self._placement_groups)} placement groups were not ready within "
                f"{self._ready_timeout:g} s, because the cluster is in use. {self.resources_text()}\n"
                f"All reservations were released. {self._advice}"
            )

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
        self._port_reservers, self._placement_groups, self._placements = {}, [], []
        runtime.release(id(self))
        return gone

    def __del__(self) -> None:
        if getattr(self, "_placement_groups", None):
            with contextlib.suppress(Exception):  # Python or Ray is shutting down, which releases them anyway
                self.shutdown()

    def resources_text(self) -> str:
        """The requested resources, and those of each machine of the cluster, for messages."""
        nodes = ", ".join(f"node {index}: {count}" for index, count in enumerate(self._counts))
        total = {name: amount * self.world_size() for name, amount in self.bundle.items()}
        found = "\n".join(placement.describe_machine(machine, self.bundle) for machine in machines())
        return (
            f"The {self._title} requests bundles of {placement.describe(self.bundle)} ({nodes}), in total "
            f"{placement.describe(total)}. The Ray cluster has\n{found or '  no nodes'}"
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ClusterArgumentError(message)


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
