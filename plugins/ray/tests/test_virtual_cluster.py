"""Virtual clusters: validation, placement of bundles, and release of resources."""

from __future__ import annotations

import socket
import time

import pytest
import ray
from ray.util.placement_group import placement_group_table

from rlframework.base.errors import UserError
from rlframework_ray import placement
from rlframework_ray.placement import Machine, Placement
from rlframework_ray.virtual_cluster import RayVirtualCluster, ResourceInsufficientError, init_ray

pytestmark = pytest.mark.slow

on_ray = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_session")]
CPU = {"CPU": 1.0}


def machine(name, cpus, free=None):
    return Machine(name, f"address of {name}", name, {"CPU": cpus}, {"CPU": cpus if free is None else free})


@pytest.fixture
def cluster():
    """`cluster(...)`: a virtual cluster on CPU, released afterwards."""
    made = []

    def make(*args, **kwargs):
        made.append(RayVirtualCluster(*args, **{"use_gpus": False, "max_retries": 1, **kwargs}))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


# -- what is asked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *[({"bundle_ct_per_node_list": counts}, "bundle_ct_per_node_list") for counts in ([], [0, 0], [1, -1], "12")],
        *[({"bundle_ct_per_node_list": counts}, "bundle_ct_per_node_list") for counts in ([1.0], [True])],
        ({"num_gpus_per_node": 0}, "num_gpus_per_node=0"),
        ({"max_colocated_worker_groups": 0}, "max_colocated_worker_groups=0"),
        ({"placement_group_strategy": "FAR"}, "PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"),
        ({"max_retries": 0}, "max_retries=0"),
    ],
)
def test_invalid_arguments_are_also_assertion_errors(wrong, message):
    with pytest.raises(AssertionError, match=message) as told:
        RayVirtualCluster(**{"bundle_ct_per_node_list": [1], **wrong})
    assert isinstance(told.value, UserError)


def test_bundles_are_counted_and_described_without_ray():
    assert RayVirtualCluster([1], use_gpus=False, num_gpus_per_node=0).bundle == {"CPU": 1}
    cluster = RayVirtualCluster([2, 0, 1], max_colocated_worker_groups=3)
    assert cluster.bundle == {"CPU": 3, "GPU": 1}
    assert (cluster.world_size(), cluster.node_count()) == (3, 2)


def test_retries_come_from_the_variable(monkeypatch):
    monkeypatch.setenv("NRL_VIRTUAL_CLUSTER_MAX_RETRIES", "0")
    with pytest.raises(AssertionError, match="NRL_VIRTUAL_CLUSTER_MAX_RETRIES=0"):
        RayVirtualCluster([1])
    monkeypatch.setenv("NRL_VIRTUAL_CLUSTER_MAX_RETRIES", "3")
    assert RayVirtualCluster([1])._max_retries == 3


# -- where bundles go -------------------------------------------------------------------------------------------------


def test_a_capacity_shortfall_is_explained():
    machines = [machine("a", 4), machine("b", 2)]
    assert placement.capacity_shortfall([4, 2], CPU, machines, unified=False) == ""
    assert placement.capacity_shortfall([2, 2, 2], CPU, machines, unified=False) == ""
    assert "room for 6" in placement.capacity_shortfall([4, 3], CPU, machines, unified=False)
    assert "1 node(s) with room for 5" in placement.capacity_shortfall([5], CPU, machines, unified=False)
    assert "2 node(s) with room for 3" in placement.capacity_shortfall([3, 3], CPU, machines, unified=False)
    assert placement.capacity_shortfall([3, 3], CPU, machines, unified=True) == ""
    assert "room for 0" in placement.capacity_shortfall([1], {"CPU": 1, "GPU": 1}, machines, unified=False)


def test_groups_go_to_different_machines_while_any_are_free():
    machines = [machine("a", 8), machine("b", 2), machine("c", 4, free=1)]
    assert placement.assign([2, 2], CPU, machines) == ["a", "b"]
    assert placement.assign([1, 2, 2], CPU, machines) == ["c", "a", "b"]
    assert placement.assign([4, 4], CPU, machines) == ["a", "a"]
    assert placement.assign([8, 3], CPU, machines) is None


def test_groups_are_nodes_and_the_machines_of_one_group_too():
    addresses = {"x": "10.0.0.1", "y": "10.0.0.2"}
    assert placement.rank_placements([["y", "y"], ["x"]], addresses) == [
        Placement(0, 0, "y", "10.0.0.2", 0, 0),
        Placement(0, 1, "y", "10.0.0.2", 0, 1),
        Placement(1, 0, "x", "10.0.0.1", 1, 0),
    ]
    assert placement.rank_placements([["x", "y", "x"]], addresses) == [
        Placement(0, 0, "x", "10.0.0.1", 0, 0),
        Placement(0, 2, "x", "10.0.0.1", 0, 1),
        Placement(0, 1, "y", "10.0.0.2", 1, 0),
    ]


# -- on Ray -----------------------------------------------------------------------------------------------------------


@pytest.mark.xdist_group("ray")
class TestOnRay:
    """With the Ray of the test session, which has one node."""

    pytestmark = on_ray

    def test_nothing_is_reserved_before_it_is_needed(self, cluster):
        made = cluster([1, 0, 1])
        assert made._placement_groups == []
        assert len(made.get_placement_groups()) == 2  # one per node with bundles
        assert made.get_placement_groups() == made.get_placement_groups()
        assert [(place.node_rank, place.local_rank) for place in made.placements()] == [(0, 0), (1, 0)]
        made.shutdown()
        made = cluster([1, 1])
        assert len(made._init_placement_groups(use_unified_pg=True)) == 1
        assert [(place.node_rank, place.local_rank) for place in made.placements()] == [(0, 0), (0, 1)]

    def test_insufficient_resources_are_reported_with_the_request(self, cluster):
        cpus = int(ray.cluster_resources()["CPU"])
        with pytest.raises(ResourceInsufficientError) as told:
            cluster([1, cpus], name="mine").get_placement_groups()
        for part in ("'mine'", "node 0: 1", f"node 1: {cpus}", f"in total CPU {cpus + 1}", f"CPU {cpus} ("):
            assert part in str(told.value)

    def test_the_pauses_double(self, cluster, monkeypatch, caplog):
        pauses = []
        monkeypatch.setattr("rlframework_ray.virtual_cluster.time.sleep", pauses.append)
        with pytest.raises(ResourceInsufficientError, match=r"retries reached \(4\)"):
            cluster([999], max_retries=4).get_placement_groups()
        assert pauses == [1, 2, 4]
        assert "checking again in 4 s" in caplog.text

    def test_resources_in_use_raise_a_timeout_and_nothing_stays_reserved(self, cluster):
        cpus = int(ray.cluster_resources()["CPU"])
        cluster([cpus]).get_placement_groups()
        late = cluster([1], ready_timeout=0.5)
        with pytest.raises(TimeoutError, match="were not ready"):
            late.get_placement_groups()
        assert late._placement_groups == []
        mine = [each for each in placement_group_table().values() if each["state"] == "PENDING"]
        assert mine == []

    def test_the_master_address_is_loopback_on_one_machine_and_its_port_is_reserved(self, cluster):
        made = cluster([1])
        address, port = made.get_master_address_and_port()
        assert address == "127.0.0.1"
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((address, port))
        assert made.get_available_address_and_port(0, 0) != (address, port)
        with pytest.raises(IndexError, match="no bundle 1"):
            made.get_available_address_and_port(0, 1)
        assert made.shutdown()
        with socket.socket() as free:
            _bind_soon(free, (address, port))

    def test_shutdown_or_garbage_collection_releases_everything(self, cluster):
        made = cluster([1])
        group = made.get_placement_groups()[0]
        assert made.shutdown()
        assert made.shutdown()
        assert placement_group_table(group)["state"] == "REMOVED"
        made = RayVirtualCluster([1], use_gpus=False)
        group = made.get_placement_groups()[0]
        del made
        assert placement_group_table(group)["state"] == "REMOVED"

    def test_init_ray_uses_an_existing_connection(self):
        before = ray.get_runtime_context().get_node_id()
        init_ray()
        assert ray.get_runtime_context().get_node_id() == before


def _bind_soon(free, address, seconds=60.0):
    """The process that reserved the port is being killed."""
    until = time.monotonic() + seconds
    while True:
        try:
            return free.bind(address)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
