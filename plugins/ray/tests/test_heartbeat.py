"""When a worker counts as silent. What follows from it is shown in `test_several_nodes`."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from rlframework_ray import heartbeat
from rlframework_ray.heartbeat import Heartbeat


@pytest.fixture
def hasty(monkeypatch):
    """Several times as fast as usual."""
    monkeypatch.setattr(heartbeat, "PERIOD", 0.1)
    monkeypatch.setattr(heartbeat, "TIMEOUT", 1.0)


def becomes_silent(beat, rank, seconds=60.0):
    until = time.monotonic() + seconds
    while not beat.is_silent(rank) and time.monotonic() < until:
        time.sleep(0.02)
    return beat.is_silent(rank)


def test_a_loss_is_noticed_within_thirty_seconds():
    assert (heartbeat.PERIOD + heartbeat.TIMEOUT) * heartbeat.ATTEMPTS < 20  # ending the others takes up to 10 more


@pytest.mark.slow
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
