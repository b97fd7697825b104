"""Worker groups on a Ray cluster of three nodes, all on this machine, in a program of its own: see `several_nodes`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.thorough, pytest.mark.timeout(1300)]

FOLDER = Path(__file__).parents[3] / "tests" / "workers"


@pytest.fixture(scope="module")
def seen():
    """The result of each scenario, by name."""
    path = os.pathsep.join([str(FOLDER), str(FOLDER.parent.parent)])
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "several_nodes.py")],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert ran.returncode == 0, ran.stderr[-3000:]
    return {line["name"]: line for line in lines}


@pytest.fixture
def of(seen):
    """`of(scenario)`: its result; fails with the scenario's own traceback."""

    def returned(name):
        assert "traceback" not in seen[name], seen[name]["traceback"]
        return seen[name]["returned"]

    return returned


def test_each_node_has_the_requested_workers_and_ranks_follow_nodes(of):
    told = of("one_group_a_node")
    first, second, third = told["nodes"][0], told["nodes"][2], told["nodes"][4]
    assert told["nodes"] == [first, first, second, second, third]
    assert len({first, second, third}) == 3
    assert told["node_ranks"] == ["0", "0", "1", "1", "2"]
    assert told["local_ranks"] == ["0", "1", "0", "1", "0"]
    assert [each["node_idx"] for each in told["metadata"]] == [0, 0, 1, 1, 2]
    assert [each["name"] for each in told["metadata"]] == ["-0-0", "-0-1", "-1-0", "-1-1", "-2-0"]
    assert (told["node_count"], told["world_size"], told["groups"]) == (3, 5, 3)  # a node has no bundles
    assert told["address"].startswith("127.0.0.")
    assert told["address"] != "127.0.0.1"  # which each node takes for itself
    assert (told["peaceful"], told["running"], told["all_free"]) == (True, [], True)


def test_insufficient_and_busy_resources_are_reported_per_node(of):
    told = of("too_few_resources")
    for error in (told["nodes"], told["all"]):
        assert error["classes"][:3] == ["ResourceInsufficientError", "ConfigError", "UserError"]
        assert error["seconds"] < 15  # and not after the 20 that groups wait for each other
        assert all(f"node 127.0.0.{last} (" in error["message"] for last in (2, 3, 4))
    assert "(node 0: 3, node 1: 3), in total CPU 6" in told["nodes"]["message"]
    assert "2 node(s) with room for 3 bundles are needed, but there are only 0" in told["nodes"]["message"]
    assert "18 bundle(s) are needed, but there is only room for 6" in told["all"]["message"]
    error = told["busy"]
    assert "TimeoutError" in error["classes"]
    assert "CPU 2 (0 free)" in error["message"]
    assert told["all_free"]


def test_two_groups_share_the_bundles_and_a_third_is_rejected(of):
    told = of("two_groups_share")
    one, two = told["nodes"]
    assert one == two
    assert len(set(one)) == 2
    assert told["free"] == 2.0  # of six: two bundles of two are taken, once
    assert "already has all 2 worker group(s)" in told["third"]["message"]


def test_a_node_that_leaves_fails_the_call_with_rank_and_node(of):
    told = of("a_node_leaves")
    error = told["error"]
    assert "WorkerError" in error["classes"]
    assert f"rank {told['rank']} of 2" in error["message"]
    assert told["lost"][:8] in error["message"]
    assert error["seconds"] < 55  # before the deadline of the call
    assert "no longer usable" in told["after"]["message"]
    assert told["running"] == []
    assert told["peaceful"]
    assert told["groups_left"] == []


# -- groups of a configuration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "ranks"), [("one_each", [[0, 0], [1, 0]]), ("packed", [[0, 0], [0, 1]]), ("spread", [[0, 0], [1, 0]])]
)
def test_workers_are_placed_as_configured_and_everything_is_released(of, how, ranks):
    told = of("configured_groups")[how]
    assert told["ranks"] == ranks
    assert told["sum"] == [6.0, 6.0]
    assert told["ended"] is True
    assert told["running"] == []
    assert told["all_free"]


def test_configured_workers_get_addresses_threads_and_named_variables(of):
    told = of("configured_groups")
    assert set(told["one_each"]["addresses"]) == {told["one_each"]["nodes"][0]}
    assert set(told["packed"]["addresses"]) == {"127.0.0.1"}
    (node,) = set(told["packed"]["nodes"])
    assert node.startswith("127.0.0.")  # at which engines on another machine reach the trainer
    assert node != "127.0.0.1"
    assert set(told["one_each"]["threads"]) == {int(os.environ["OMP_NUM_THREADS"])}  # as the user set it
    assert told["one_each"]["variables"] == [["passed on", "a value", None]] * 2
    assert told["packed"]["variables"] == [[None, None, None]] * 2
    assert "ConfigError" in told["uneven"]["classes"]
    message = "worker_group.num_workers=3 is not divisible by worker_group.workers_per_node=2"
    assert message in told["uneven"]["message"]


def test_a_node_that_falls_silent_is_lost_and_busy_workers_are_not(of):
    told = of("a_node_falls_silent")
    assert told["error"]["classes"][0] == "WorkerLost"
    assert f"rank {told['rank']} of 2" in told["error"]["message"]
    assert "it no longer answers: it is stopped, or its machine or network is down" in told["error"]["message"]
    assert told["error"]["seconds"] < 55
