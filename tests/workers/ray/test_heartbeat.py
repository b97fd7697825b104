"""Workers that no longer answer, although their connections are open, are lost within seconds; busy ones are not."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

import pytest

from rlframework.config.sections import RayGroupConfig
from rlframework.errors import WorkerLost
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers.ray import heartbeat
from rlframework.workers.ray.heartbeat import Heartbeat


@pytest.fixture
def hasty(monkeypatch):
    """Ten times as fast as usual."""
    monkeypatch.setattr(heartbeat, "PERIOD", 0.2)
    monkeypatch.setattr(heartbeat, "TIMEOUT", 0.4)


def becomes_silent(beat, rank, seconds=10.0):
    until = time.monotonic() + seconds
    while not beat.is_silent(rank) and time.monotonic() < until:
        time.sleep(0.02)
    return beat.is_silent(rank)


def test_a_loss_is_noticed_within_thirty_seconds():
    assert (heartbeat.PERIOD + heartbeat.TIMEOUT) * heartbeat.ATTEMPTS < 20  # the rest is for ending the others


def test_silent_are_those_that_accept_connections_and_say_nothing(hasty):
    """As the kernel does for a stopped process. One that closes is alive, and one that refuses is left to Ray."""
    mute, closing, refusing = (socket.create_server(("127.0.0.1", 0)) for _ in range(3))
    addresses = dict(enumerate(each.getsockname() for each in (mute, closing, refusing)))
    refusing.close()

    def close_each():
        with contextlib.suppress(OSError):
            while True:
                closing.accept()[0].close()

    threading.Thread(target=close_each, daemon=True).start()
    beat = Heartbeat(addresses)
    with mute, closing:
        assert becomes_silent(beat, 0)
        assert not beat.is_silent(1)
        assert not beat.is_silent(2)
        beat.stop()


@pytest.fixture
def group(ray_session, hasty):
    from rlframework.workers.ray.configured_group import ConfiguredRayWorkerGroup

    config = RayGroupConfig(name="ray", num_workers=2)
    sharding = NamedSharding([0, 1], ["data_parallel"])
    made = ConfiguredRayWorkerGroup(WorkerSpec("probe_workers:Probe", {}), config, sharding=sharding, device="cpu")
    yield made
    made.shutdown()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_busy_worker_answers_and_a_stopped_one_is_lost(group):
    """A busy one keeps Python's lock for longer than any silence that is tolerated."""
    busy = 5
    assert busy > 2 * heartbeat.ATTEMPTS * (heartbeat.PERIOD + heartbeat.TIMEOUT)
    group.get_all_worker_results(group.run_all_workers_single_data("hold_the_interpreter", seconds=busy))
    pids = [each["pid"] for each in group.get_all_worker_results(group.run_all_workers_single_data("who"))]
    os.kill(pids[1], signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(WorkerLost, match=r"rank 1 of 2 .* no longer answers: it is stopped, or its machine"):
        group.get_all_worker_results(group.run_all_workers_single_data("who"))
    assert time.monotonic() - begun < 15
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
