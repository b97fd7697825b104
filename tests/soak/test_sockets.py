"""Every socket of a run is open to its machine alone, and strangers' bytes there neither stop the run nor run code."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from probe_runs import begin, rows_of

pytestmark = pytest.mark.slow

LOOPBACK = ("127.0.0.1", "::1")
Address = tuple[str, int]


class Order:
    """Creates the file `path` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


class Strangers:
    """Connects to addresses, sends what no peer would send, and keeps some connections half-open. `tried`: how many."""

    def __init__(self, draw: Random, opened: Path) -> None:
        pickled = pickle.dumps(Order(opened))
        framed = struct.pack("!i", len(pickled)) + pickled  # as multiprocessing's connections write it
        self.messages = (
            b"", b"\0", draw.randbytes(100), draw.randbytes(100_000), b"\xff" * 5_000, b"\0" * 5_000, pickled, framed,
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            struct.pack("<Q", 2**62) + b"x" * 64,
        )  # fmt: skip
        self.tried = 0
        self.held: list[socket.socket] = []

    def attack(self, address: Address) -> None:
        """Send each message on a connection of its own; end some with a reset; leave two open."""
        for number, message in enumerate((*self.messages, b"\x01", b"")):
            with contextlib.suppress(OSError):  # refused, closed or reset by the run: as it should be
                stranger = socket.create_connection(address, 2.0)
                self.tried += 1
                stranger.settimeout(2.0)
                self.held.append(stranger)
                stranger.sendall(message)
            if number < len(self.messages) and self.held:
                if number % 2:
                    self.held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.held.pop().close()

    def trickle(self) -> None:
        """Send one more byte on each connection that is still open."""
        for stranger in self.held:
            with contextlib.suppress(OSError):
                stranger.send(b"\x02")

    def close(self) -> None:
        """Close all connections."""
        for stranger in self.held:
            stranger.close()


@pytest.fixture
def strangers(soak: Any, tmp_path: Path) -> Iterator[Strangers]:
    """Strangers; nothing may unpickle what they send."""
    opened = tmp_path / "opened"
    strangers = Strangers(soak.random(), opened)
    yield strangers
    strangers.close()
    assert not opened.exists()
    soak.figures["connections"] = strangers.tried


def tree(pid: int) -> list[psutil.Process]:
    """The process and its descendants."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def sockets(processes: list[psutil.Process], kind: str) -> list[Any]:
    """The open sockets of the processes."""
    found: list[Any] = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found += process.net_connections(kind=kind)
    return found


def listening(processes: list[psutil.Process]) -> set[Address]:
    """Where the processes listen or receive datagrams from anyone."""
    return {
        (each.laddr.ip, each.laddr.port)
        for each in sockets(processes, "inet")
        if each.laddr and (each.status == psutil.CONN_LISTEN or (each.type == socket.SOCK_DGRAM and not each.raddr))
    }


def attack_until_the_end(process: BaseProcess, strangers: Strangers, seconds: float) -> set[Address]:
    """Attack each address as soon as it appears; return all of them when `process` has ended, within `seconds`."""
    known: set[Address] = set()
    until = time.monotonic() + seconds
    while process.is_alive():
        assert time.monotonic() < until, f"the run hangs; sockets {known}"
        processes = tree(process.pid or 0)
        for address in listening(processes) - known:
            known.add(address)
            assert address[0] in LOOPBACK
            strangers.attack(address)
        for each in sockets(processes, "unix"):
            assert not each.laddr.startswith("@"), "abstract sockets are open to all users of the machine"
            if each.laddr.startswith("/") and os.path.exists(each.laddr):
                folder = os.stat(os.path.dirname(each.laddr))
                assert folder.st_uid == os.getuid()
                assert not stat.S_IMODE(folder.st_mode) & 0o077
        strangers.trickle()
        process.join(0.05)
    return known


def test_the_attack_finds_what_is_open_to_others_and_code_that_runs(strangers: Strangers, tmp_path: Path) -> None:
    server = socket.create_server(("127.0.0.2", 0))  # this machine's too, but not where anything of ours listens
    address = server.getsockname()
    assert address in listening([psutil.Process()])
    assert address[0] not in LOOPBACK
    received: list[bytes] = []

    def serve() -> None:
        for _ in strangers.messages:
            connection = server.accept()[0]
            with connection, connection.makefile("rb") as file, contextlib.suppress(ConnectionResetError):
                received.append(file.read())

    victim = threading.Thread(target=serve)
    victim.start()
    strangers.attack(address)
    victim.join(60)
    server.close()
    opened = tmp_path / "opened"
    for message in received:
        with contextlib.suppress(Exception):
            pickle.loads(message).close()  # noqa: S301 - as a careless server would
    assert opened.exists()
    opened.unlink()


@pytest.mark.thorough
def test_strangers_do_not_disturb_a_run(run_config: Any, tmp_path: Path, strangers: Strangers, soak: Any) -> None:
    steps = soak.times(4, 40)
    for transport in ("collective", "ipc")[: soak.times(1, 2)]:
        options = [
            f"algorithm.num_steps={steps}",
            "algorithm.validation.every=0",
            "worker_group={name: processes, num_workers: 2, deadlines: {call: 200}}",
            "generation.workers={num_workers: 1, deadlines: {call: 200}}",
            f"generation.refit={{transport: {transport}, deadline: 200}}",
        ]
        folder = tmp_path / transport
        folder.mkdir()
        process, _ = begin(run_config("grpo", *options, f"output_dir={folder}/run"), folder / "run.yaml")
        known = attack_until_the_end(process, strangers, 300)
        assert process.exitcode == 0
        assert rows_of(folder / "run")[-1]["step"] == steps
        assert known
