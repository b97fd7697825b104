"""The environment of workers, computed without Ray, and the port that rank 0 reserves."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from rlframework.base.errors import ConfigError
from rlframework.workers import machine


def test_workers_get_named_variables_only(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_DRIVER", "x")
    monkeypatch.setenv("RLFRAMEWORK_DISABLE_PLUGINS", "this,that")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = dict(os.environ)
    given = machine.worker_environment(2)
    allowed = {*machine.FORWARDED, "OMP_NUM_THREADS", "PYTHONPATH", "GLOO_SOCKET_IFNAME"}
    assert set(given) <= allowed
    assert given["RLFRAMEWORK_DISABLE_PLUGINS"] == "this,that"
    assert dict(os.environ) == before
    monkeypatch.delenv("RLFRAMEWORK_DISABLE_PLUGINS")
    assert machine.worker_environment(1)["RLFRAMEWORK_DISABLE_PLUGINS"] == ""


@pytest.mark.parametrize(("cores", "workers", "threads"), [(8, 2, 4), (8, 3, 2), (2, 2, 1), (1, 1, 1), (1, 4, 1)])
def test_threads_share_the_cores(monkeypatch, cores, workers, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "cpu_count", lambda: cores)
    assert machine.threads_per_worker(workers) == threads


def test_threads_that_the_user_set(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert machine.threads_per_worker(2) == machine.threads_of(machine.worker_environment(2)) == 3
    assert machine.threads_of(machine.worker_environment(2, {"OMP_NUM_THREADS": "2,1"})) is None


def test_import_path_has_the_drivers_sources_and_no_installed_packages(monkeypatch, tmp_path):
    installed = tmp_path / "lib" / "site-packages"
    installed.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(installed), os.__file__.rpartition("/")[0], str(tmp_path / "absent")])
    assert machine.import_path() == [str(tmp_path)]


def test_cores(monkeypatch):
    monkeypatch.setattr(machine, "cpu_count", lambda: 2)
    machine.check_cores(2)
    with pytest.raises(ConfigError, match=r"num_workers=3, but this process may use 2 CPU core\(s\): set at most 2"):
        machine.check_cores(3)


def test_reserved_ports_are_bound_and_below_the_ephemeral_range():
    reserver = machine.PortReserver()
    address = ("127.0.0.1", reserver.reserve("127.0.0.1"))
    assert address[1] < machine.first_ephemeral_port()
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(address)
    with socket.socket() as owner:
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        owner.bind(address)
        owner.listen()
    reserver._reserved[0].close()
    with socket.socket() as other:
        other.bind(address)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("ray_session")
def test_workers_have_the_priority_of_the_driver():
    """Ray's default, niceness 15, starves workers as soon as another program is busy on the same cores."""

    import ray

    assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)


def test_a_python_is_an_absolute_path_or_a_bare_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/one")
    monkeypatch.chdir(tmp_path)
    found = {given: machine.python_path(given) for given in (None, "python3", "/a/python", "~/b/python", "c/python")}
    assert found == {
        None: None,
        "python3": "python3",
        "/a/python": "/a/python",
        "~/b/python": "/home/one/b/python",
        "c/python": str(tmp_path / "c" / "python"),
    }
