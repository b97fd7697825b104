"""The part `ray` on a Ray cluster of several nodes, which all are on this machine: see `probe_cluster.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def seen():
    """The observations of the program, which has a Ray and therefore a process of its own."""
    program = Path(__file__).parents[1] / "probe_cluster.py"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=280, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def ranks(told):
    return [(answer["node_rank"], answer["local_rank"]) for answer in told["told"]]


def test_workers_per_node_puts_one_on_each_node(seen):
    assert ranks(seen["one_each"]) == [(0, 0), (1, 0)]


def test_workers_are_packed_on_one_node_if_they_fit(seen):
    assert ranks(seen["packed"]) == [(0, 0), (0, 1)]
    assert {answer["address"] for answer in seen["packed"]["told"]} == {"127.0.0.1"}


def test_workers_are_spread_on_request(seen):
    assert ranks(seen["spread"]) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("how", ["one_each", "packed", "spread"])
def test_the_process_group_is_formed_and_everything_is_released(seen, how):
    assert seen[how]["sum"] == [6.0, 6.0]
    assert seen[how]["ended"] is True
    assert seen[how]["left"] == []
    assert seen[how]["groups"] == 0


def test_the_master_address_is_that_of_the_node_of_rank_0(seen):
    told = seen["one_each"]["told"]
    assert {answer["address"] for answer in told} == {told[0]["node"]}


def test_cores_are_shared_among_the_workers_of_a_node(seen):
    threads = int(os.environ["OMP_NUM_THREADS"])  # what the user set counts more than the cores
    assert {answer["threads"] for answer in seen["one_each"]["told"]} == {threads}


def test_only_named_variables_reach_the_workers(seen):
    for answer in seen["one_each"]["told"]:
        assert (answer["passed"], answer["given"], answer["secret"]) == ("passed on", "a value", False)
    assert all(answer["passed"] is None for answer in seen["packed"]["told"])


def test_too_many_workers_are_reported_with_the_clusters_resources(seen):
    told = seen["too_many"]
    assert told["class"] == "ResourceInsufficientError"
    assert "in total CPU 5" in told["message"]
    assert "CPU 2" in told["message"]
    assert "CPU 0" in told["message"]


def test_workers_that_are_not_divisible_over_the_nodes(seen):
    assert seen["uneven"]["class"] == "ConfigError"
    assert "worker_group.num_workers=3 is not divisible by worker_group.workers_per_node=2" in seen["uneven"]["message"]


def test_a_worker_killed_on_another_node_is_reported_with_its_standard_error(seen):
    told = seen["killed"]
    assert told["class"] == "WorkerLost"
    assert told["message"].startswith("the process of rank 1 of 2 on node ")
    assert told["message"].endswith("\nlast words of the dying")
    assert told["seconds"] < 5
    assert told["left"] == []


def test_a_lost_node_fails_the_call_within_half_a_minute(seen):
    told = seen["lost"]
    assert told["class"] == "WorkerLost"
    assert told["message"].startswith(f"the process of rank {told['rank']} of 2 on node ")
    assert told["seconds"] < 30
    assert told["left"] == []
    assert told["shutdown"] < 10
    assert seen["free"] == 2  # those of the other node
