"""Where the workers of a virtual cluster go: what is too much for the machines, which machine takes which group of
bundles, and in what order the bundles are ranks. Pure decisions over numbers; nothing here knows of Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Resources = Mapping[str, float]
"""Amounts by name, such as `{"CPU": 8, "GPU": 4}`."""


@dataclass(frozen=True)
class Machine:
    """A node: its id, its address, what it has in all, and what of that is free now."""

    node_id: str
    address: str
    total: Resources
    free: Resources


@dataclass(frozen=True)
class Placement:
    """Where one rank stands: `bundle` of placement group number `group`, on the machine `node_id` at `address`.

    `node_rank` counts the nodes from 0 in the order of ranks, `local_rank` the ranks of one node.
    """

    group: int
    bundle: int
    node_id: str
    address: str
    node_rank: int
    local_rank: int


def lacking(bundle_counts: Sequence[int], bundle: Resources, machines: Sequence[Machine], *, unified: bool) -> str:
    """Why these machines can never hold the bundles, whatever runs on them now; empty where nothing speaks against it.

    A group of bundles goes on one machine, unless all are `unified`: then each bundle may go anywhere.
    """
    total, places = sum(bundle_counts), sum(_fits(bundle, machine.total) for machine in machines)
    if total > places:
        return f"{total} bundle(s) are needed, and there is room for {places}"
    for size in () if unified else sorted(set(bundle_counts) - {0}, reverse=True):
        asked = sum(other >= size for other in bundle_counts)
        room = sum(_fits(bundle, machine.total) // size for machine in machines)
        if asked > room:
            return f"{asked} node(s) with room for {size} bundles are needed, and there is room for {room}"
    return ""


def assign(bundle_counts: Sequence[int], bundle: Resources, machines: Sequence[Machine]) -> list[str] | None:
    """The id of the machine for each group of bundles, by what is free now; None where it does not all fit at once.

    The largest groups choose first, each the machine with the most room among those that have no group yet; machines
    are shared only when all are taken.
    """
    chosen: dict[int, str] = {}
    room = {machine.node_id: _fits(bundle, machine.free) for machine in machines}
    for index in sorted(range(len(bundle_counts)), key=lambda index: -bundle_counts[index]):
        able = [node for node in room if room[node] >= bundle_counts[index]]
        if not able:
            return None
        node = min(able, key=lambda node: (node in chosen.values(), -room[node]))
        room[node] -= bundle_counts[index]
        chosen[index] = node
    return [chosen[index] for index in range(len(bundle_counts))]


def in_rank_order(nodes: Sequence[Sequence[str]], addresses: Mapping[str, str]) -> list[Placement]:
    """The placement of each rank, given the machine of each bundle of each group.

    Several groups: a group is a node, and ranks follow the groups. One group that spreads over machines: the machines
    are the nodes, in the order in which the bundles name them, and the ranks of one machine follow each other.
    """
    if len(nodes) > 1:
        return [
            Placement(group, bundle, node, addresses.get(node, ""), group, bundle)
            for group, of_group in enumerate(nodes)
            for bundle, node in enumerate(of_group)
        ]
    bundles: dict[str, list[int]] = {}
    for bundle, node in enumerate(nodes[0] if nodes else ()):
        bundles.setdefault(node, []).append(bundle)
    return [
        Placement(0, bundle, node, addresses.get(node, ""), node_rank, local_rank)
        for node_rank, (node, of_node) in enumerate(bundles.items())
        for local_rank, bundle in enumerate(of_node)
    ]


def describe(resources: Resources) -> str:
    """`CPU 2, GPU 1`: the amounts, as messages have them."""
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def describe_machines(machines: Iterable[Machine], names: Sequence[str]) -> str:
    """One line a machine: its address, the start of its id, and what it has and has free of these resources."""
    lines = [
        f"  node {machine.address} ({machine.node_id[:8]}): "
        + ", ".join(f"{name} {machine.total.get(name, 0):g} ({machine.free.get(name, 0):g} free)" for name in names)
        for machine in machines
    ]
    return "\n".join(lines) or "  no node at all"


def _fits(bundle: Resources, room: Resources) -> int:
    """How many bundles `room` holds."""
    return min((int((room.get(name, 0) + 1e-6) // amount) for name, amount in bundle.items() if amount), default=0)
