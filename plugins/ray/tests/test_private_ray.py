"""The folder and the processes of a Ray that a driver starts end with the driver; when a worker counts as silent."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlframework.workers.temporary import TemporaryFolder
from rlframework_ray import heartbeat, private_ray
from rlframework_ray.heartbeat import Heartbeat
from rlframework_ray.private_ray import PrivateRay


@pytest.fixture
def parent(monkeypatch):
    """A folder with a short path, as Ray's sockets need one, that is RAY_TMPDIR."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rt") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


def ray_process(private):
    """A process that inherits what Ray's processes inherit."""
    return subprocess.Popen(["sleep", "600"], env={**os.environ, **private.environment})


def soon(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_the_end_kills_its_processes_and_removes_its_folder_alone(parent):
    private, other = PrivateRay(), PrivateRay()
    (private.temp_dir / "session").mkdir(parents=True)
    private.temp_dir.chmod(0o777)  # as Ray does
    assert private.folder.stat().st_mode & 0o777 == 0o700
    mine, others = ray_process(private), ray_process(other)
    agent = subprocess.Popen(["sleep", "600"], process_group=private.group)  # Ray's overwrite their environment
    private.end()
    assert (mine.wait(60), agent.wait(60)) == (-signal.SIGKILL, -signal.SIGKILL)
    assert list(parent.iterdir()) == [other.folder]
    assert others.poll() is None
    other.end()
    assert others.wait(60) == -signal.SIGKILL
    assert list(parent.iterdir()) == []


DRIVER = """
import os, signal, subprocess, sys, time
from rlframework_ray.private_ray import PrivateRay
private = PrivateRay()
private.temp_dir.mkdir()
child = subprocess.Popen(["sleep", "600"], env={**os.environ, **private.environment}, stdout=subprocess.DEVNULL)
print(private._watcher.pid, child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def driver(parent):
    """The process ids of a driver, of its watcher and of a process of its Ray."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-c", DRIVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as found:
        yield found.pid, *map(int, found.stdout.readline().split())
        found.kill()


def ignores_sigterm(pid):
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_drivers_ray_is_gone(parent, driver):
    pid, watcher, child = driver
    assert soon(lambda: ignores_sigterm(watcher))
    os.kill(watcher, signal.SIGTERM)  # a scheduler may signal all processes of a job
    os.kill(pid, signal.SIGKILL)
    assert soon(lambda: ended(child) and not list(parent.iterdir()))
    assert soon(lambda: ended(watcher))


@pytest.mark.slow
def test_what_a_killed_watcher_left_is_removed_by_the_next_start(parent, driver):
    pid, watcher, child = driver
    (abandoned,) = parent.iterdir()
    for each in (watcher, pid):
        os.kill(each, signal.SIGKILL)
    assert soon(lambda: ended(watcher) and ended(pid))
    (elsewhere := parent / "elsewhere").mkdir()
    (parent / f"{private_ray._PREFIX}somelink").symlink_to(elsewhere)
    private = PrivateRay()
    assert ended(child)
    assert not abandoned.exists()
    assert elsewhere.exists()
    private.end()


@pytest.mark.slow
def test_the_end_does_what_a_killed_watcher_could_not(parent):
    private = PrivateRay()
    child = ray_process(private)
    private._watcher.kill()
    private.end()
    assert child.wait(60) == -signal.SIGKILL
    assert list(parent.iterdir()) == []


@pytest.mark.slow
def test_a_log_folder_stays_however_long_its_path_is(parent, tmp_path):
    private = PrivateRay(tmp_path / "logs")
    (private.temp_dir / "session").mkdir()
    private.end()
    TemporaryFolder(str(tmp_path / "logs"), private_ray._PREFIX).remove()
    (kept,) = (tmp_path / "logs").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o700
    assert (kept / "r" / "session").is_dir()
    assert list(parent.iterdir()) == []


def test_a_long_path_is_rejected_if_it_was_named_and_avoided_otherwise(monkeypatch, tmp_path):
    deep = tmp_path / ("long" * 10)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert private_ray.folders_parent() == Path("/tmp")
    monkeypatch.setenv("RAY_TMPDIR", str(deep))
    with pytest.raises(OSError, match=r"RAY_TMPDIR=.* but Ray's sockets need a path of at most \d+: set it to"):
        private_ray.folders_parent()


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
