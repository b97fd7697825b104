"""The rendezvous of ranks at one address, which is not open to others."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import psutil
import pytest

from rlframework.interfaces.worker_group import WorkerContext
from rlframework.workers.machine import PortReserver
from rlframework.workers.process_groups import process_store


def listening():
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process().net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.fixture
def contexts():
    """The contexts of two ranks at a free port."""
    reserver = PortReserver()
    port = reserver.reserve("127.0.0.1")
    yield [WorkerContext(rank=rank, world_size=2, master_port=port, deadline=60.0) for rank in (0, 1)]
    reserver._reserved[0].close()


def test_rank_0_only_listens_at_the_address_of_its_context(contexts):
    before = listening()
    store = process_store(contexts[0])
    assert listening() - before == {("127.0.0.1", contexts[0].master_port)}
    del store
    assert listening() - before == set()


@pytest.mark.slow
def test_an_early_rank_waits_until_rank_0_serves(contexts):
    got = []

    def second():
        store = process_store(contexts[1])
        got.append(time.monotonic())
        got.append(store.get("word"))

    other = threading.Thread(target=second)
    other.start()
    time.sleep(0.3)
    assert got == []
    begun = time.monotonic()
    store = process_store(contexts[0])
    store.set("word", "oak")
    other.join(60)
    assert got[0] >= begun
    assert got[1] == b"oak"


def test_a_missing_rank_0_raises_a_timeout(contexts):
    with pytest.raises(TimeoutError, match=r"rank 0 did not serve the process group at 127\.0\.0\.1:\d+ within 0\.2 s"):
        process_store(replace(contexts[1], deadline=0.2))
