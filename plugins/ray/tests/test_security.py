"""Isolation of the Ray that a run starts: unreachable from other machines, and without the driver's secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]
SECRETS = {"PLANTED_SECRET": "hunter2-hunter2", "HF_TOKEN": "hunter3-hunter3", "NCCL_API_KEY": "hunter4-hunter4"}
NAMED = {"NAMED_TOKEN": "hunter5-hunter5"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The program's observations. It needs its own Ray, and so its own process."""
    program = Path(__file__).parent / "probe_security.py"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | SECRETS | NAMED
    environment["HOME"] = str(tmp_path_factory.mktemp("home"))  # where Ray has no token yet
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=180, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert not any(secret in done.stdout.partition('{"before"')[0] + done.stderr for secret in SECRETS.values())
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def test_all_ports_listen_on_loopback(seen):
    assert set(seen["listening"]) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert seen["listening"]  # there is something to be seen


def test_secrets_of_the_driver_reach_no_other_process(seen):
    assert len(seen["variables"]) > 3
    for process, variables in seen["variables"].items():
        text = "\n".join(variables)
        assert not any(name in text or value in text for name, value in SECRETS.items()), process
    assert not set(seen["worker"]) & set(SECRETS)


def test_a_named_secret_reaches_only_the_worker_and_no_log(seen):
    assert seen["worker"]["NAMED_TOKEN"] == NAMED["NAMED_TOKEN"]
    holders = [process for process, variables in seen["variables"].items() if "NAMED_TOKEN" in "\n".join(variables)]
    assert all("WorkerActor" in process for process in holders)
    assert seen["logs"] == []
    assert seen["files"] > 5


def test_the_environment_of_the_driver_is_unchanged(seen):
    by_ray = {"RAY_AUTH_MODE", "PYTHONBREAKPOINT"}
    after = {name: value for name, value in seen["after"].items() if name not in by_ray}
    assert after == {name: value for name, value in seen["before"].items() if name not in by_ray}


def test_token_authentication_rejects_others(seen):
    assert seen["mode"] == "token"
    assert seen["token"] == "0o600"
    assert seen["answers"] == {"none": "UNAUTHENTICATED", "wrong": "UNAUTHENTICATED", "right": "1 node"}


def test_other_users_cannot_read_its_folder_and_all_its_processes_are_known(seen):
    assert seen["folder"] == ["0o700", True]
    assert seen["unknown"] == []


def test_shutdown_leaves_no_process_no_port_and_no_folder(seen):
    assert seen["folder stays"] is False
    assert seen["ended"] is True
    assert seen["left"] == []
    assert seen["still listening"] == []
