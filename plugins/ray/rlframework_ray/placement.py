"""Placement: checks a cluster's capacity, assigns bundles to machines, orders them as ranks, and selects a group's.

Pure functions of numbers, without Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rlframework.base.errors import ConfigError

Resources = Mapping[str, float]
"""Resource amounts by name, such as `{"CPU": 8, "GPU": 4}`."""


class ClusterArgumentError(ConfigError, ValueError, AssertionError):
    """An invalid argument of a virtual cluster or a worker group."""


@dataclass(frozen=True)
class Machine:
    """A node: its id, address and host name, its total resources, and those that are free now."""

    node_id: str
    address: str
    host: str
    total: Resources
    free: Resources


@dataclass(frozen=True)
class Placement:
    """The placement of one rank: `bundle` of placement group number `group`, on the machine `node_id` at `address`.

    `node_rank` numbers the nodes from 0 in rank order, `local_rank` the ranks of a node.
    """

    group: int
    bundle: int
    node_id: str
    address: str
    node_rank: int
    local_rank: int


def capacity_shortfall(
    bundle_counts: Sequence[int], bundle: Resources, machines: Sequence[Machine], *, unified: bool
) -> str:
    """Why these machines could not hold the bundles even if all were idle; empty if they could.

    All bundles of a group must fit on one machine, unless they are `unified`: then each bundle may go anywhere.
    """
    needed, capacity = sum(bundle_counts), sum(_fits(bundle, machine.total) for machine in machines)
    if needed > capacity:
        return f"{needed} bundle(s) are needed, but there is only room for {capacity}"
    for size in () if unified else sorted(set(bundle_counts) - {0}, reverse=True):
        nodes = sum(other >= size for other in bundle_counts)
        room = sum(_fits(bundle, machine.total) // size for machine in machines)
        if nodes > room:
            return f"{nodes} node(s) with room for {size} bundles are needed, but there are only {room}"
    return ""


def assign(bundle_counts: Sequence[int], bundle: Resources, machines: Sequence[Machine]) -> list[str] | None:
    """The machine id for each group of bundles, given the free resources; None if not all groups fit now.

    Groups are assigned from the largest to the smallest, each to the machine with the most room among those without a
    group; machines are shared only once each has one.
    """
    chosen: dict[int, str] = {}
    room = {machine.node_id: _fits(bundle, machine.free) for machine in machines}
    for index in sorted(range(len(bundle_counts)), key=lambda index: -bundle_counts[index]):
        candidates = [node for node in room if room[node] >= bundle_counts[index]]
        if not candidates:
            return None
        node = min(candidates, key=lambda node: (node in chosen.values(), -room[node]))
        room[node] -= bundle_counts[index]
        chosen[index] = node
    return [chosen[index] for index in range(len(bundle_counts))]


def rank_placements(nodes: Sequence[Sequence[str]], addresses: Mapping[str, str]) -> list[Placement]:
    """The placement of each rank, given the machine of each bundle of each group.

    With several groups, each group is a node and ranks follow the order of the groups. With one group spread over
    machines, the machines are the nodes, in order of first appearance, and the ranks of a machine are consecutive.
    """
    of_nodes: dict[int | str, list[tuple[int, int, str]]] = {}
    for group, of_group in enumerate(nodes):
        for bundle, node in enumerate(of_group):
            of_nodes.setdefault(group if len(nodes) > 1 else node, []).append((group, bundle, node))
    return [
        Placement(group, bundle, node, addresses.get(node, ""), node_rank, local_rank)
        for node_rank, of_node in enumerate(of_nodes.values())
        for local_rank, (group, bundle, node) in enumerate(of_node)
    ]


def one_worker_per_bundle(
    placements: Sequence[Placement], groups: int, workers_per_node: int | list[int] | None
) -> list[tuple[int, list[int]]]:
    """A tied group of one worker for each used bundle, in rank order; `groups` is the number of placement groups."""
    bundles = [[place.bundle for place in placements if place.group == group] for group in range(groups)]
    sizes = [len(each) for each in bundles]
    counts = sizes if workers_per_node is None else workers_per_node
    if type(counts) is int:
        counts = [counts] * groups
    if not isinstance(counts, list):
        raise ClusterArgumentError(
            f"workers_per_node={workers_per_node!r} must be a number, a list with one number per node, or None"
        )
    if len(counts) != groups or any(not 0 <= count <= most for count, most in zip(counts, sizes, strict=True)):
        raise ClusterArgumentError(f"workers_per_node={workers_per_node} does not fit: the nodes have {sizes} bundles")
    return [(group, [bundle]) for group in range(groups) for bundle in islice(bundles[group], counts[group])]


def assign_workers(
    placements: Sequence[Placement], tied_groups: Sequence[tuple[int, list[int]]], name_prefix: str
) -> tuple[list[Placement], list[dict[str, Any]]]:
    """The placement and the metadata of each worker: one for each bundle of each tied group `(node, bundles)`.

    `bundle_indices` of a worker are those of its tied group, and None for all workers of the group but the first.
    """
    known = {(each.group, each.bundle): each for each in placements}
    chosen: list[Placement] = []
    metadata: list[dict[str, Any]] = []
    for group, (node, bundles) in enumerate(tied_groups):
        for tied_rank, bundle in enumerate(bundles):
            if (node, bundle) not in known:
                raise ClusterArgumentError(
                    f"no bundle {bundle} on node {node}; available (node, bundle) pairs: {sorted(known)}"
                )
            suffix = f"{node}-{bundle}" if len(bundles) == 1 else f"grp{group}-{tied_rank}"
            place = {"node_idx": node, "local_rank": tied_rank, "global_rank": len(metadata), "dp_shard_idx": group}
            leads = (node, list(bundles)) if tied_rank == 0 else None
            metadata.append({**place, "name": f"{name_prefix}-{suffix}", "bundle_indices": leads})
            chosen.append(known[node, bundle])
    if not chosen:
        raise ClusterArgumentError("a worker group needs at least one worker: select at least one bundle")
    return chosen, metadata


def describe(resources: Resources) -> str:
    """The amounts as text for messages: `CPU 2, GPU 1`."""
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def describe_machine(machine: Machine, names: Iterable[str]) -> str:
    """One line: the address of a machine, the start of its id, and its total and free amounts of these resources."""
    amounts = (f"{name} {machine.total.get(name, 0):g} ({machine.free.get(name, 0):g} free)" for name in names)
    return f"  node {machine.address} ({machine.node_id[:8]}): {', '.join(amounts)}"


def _fits(bundle: Resources, room: Resources) -> int:
    """The number of bundles that fit into `room`."""
    return min((int((room.get(name, 0) + 1e-6) // amount) for name, amount in bundle.items() if amount), default=0)
