"""Checks of the cluster: addresses, tokens and machines, each made up."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from probe_findings import GIB, levels

from rlframework.generation.engine_environment import ProbeError
from rlframework_tools.doctor import run

NODE = {"address": "10.0.0.1", "alive": True, "cpus": 8.0, "gpus": 2.0, "memory_bytes": GIB, "object_store_bytes": GIB}
CLUSTER = {
    "ray": "2.60.0",
    "python": "3.11.7",
    "nodes": [NODE, NODE | {"address": "10.0.0.2"}, NODE | {"address": "10.0.0.3", "alive": False}],
    "free": {"CPU": 12.0},
}


@pytest.fixture
def listening(monkeypatch):
    """The address of somebody who accepts connections, as RAY_ADDRESS."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: _accept(server), daemon=True).start()
        where = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", where)
        yield where


def _accept(server):
    while True:
        try:
            server.accept()[0].close()
        except OSError:
            return


def test_without_an_address_a_run_has_a_ray_of_its_own(found, monkeypatch):
    [finding] = found("cluster", "ray")
    assert "starts a local instance on 127.0.0.1" in finding.text
    assert found("cluster", "nodes") == []
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert found("cluster", "nodes") == []


def test_the_cluster_is_told_with_its_machines(found, probed, listening):
    *nodes, whole, gone = found("cluster", "nodes", probed({"ray_cluster": CLUSTER}))
    assert [node.text.partition(":")[0] for node in nodes] == ["node 10.0.0.1", "node 10.0.0.2"]
    assert whole.text == "2 node(s); free now: 12 CPU, 0 GPU; ray 2.60.0 and Python 3.11.7 on both sides"
    assert gone.text == "nodes that left the cluster: 10.0.0.3"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            "RuntimeError: Version mismatch: The cluster was started with: Ray: 2.59",
            "Install exactly the same versions",
        ),
        ("AuthenticationError: InvalidAuthToken: Authentication token is missing", "Set RAY_AUTH_MODE=token, and copy"),
        ("ConnectionError: no raylet", "Start a cluster (`ray start --head`)"),
    ],
)
def test_a_cluster_that_refuses_is_told_with_what_to_do(found, probed, listening, error, remedy):
    [finding] = found("cluster", "nodes", probed({"ray_cluster": ProbeError(error)}))
    assert finding.level == "broken"
    assert error in finding.text
    assert finding.remedy.startswith(remedy)


@pytest.mark.parametrize("where", ["127.0.0.1:1", "nonsense", "ray://127.0.0.1:10001"])
def test_an_address_where_nobody_is(found, monkeypatch, where):
    """No child process is started, so the answer comes at once."""
    monkeypatch.setenv("RAY_ADDRESS", where)
    assert levels(found("cluster", "nodes")) == ["broken"]


def test_a_run_without_ray_does_not_mind(found, monkeypatch, with_config):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert levels(found("cluster", "nodes", with_config())) == ["warning"]
    assert levels(found("cluster", "nodes", with_config("worker_group.name=ray"))) == ["broken"]


def test_the_configuration_s_address_counts_before_the_variable(with_config, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "b:1")
    assert run.address(with_config("worker_group.name=ray", "worker_group.address=a:1")) == "a:1"
    assert run.address(with_config("worker_group.name=ray")) == "b:1"


@pytest.fixture
def token(bare: Path):
    """`token(mode)`: the file that Ray writes, with these permissions."""

    def make(mode: int) -> Path:
        path = bare / ".ray" / "auth_token"
        path.parent.mkdir(exist_ok=True)
        path.write_text("0123456789abcdef")
        path.chmod(mode)
        return path

    return make


def test_tokens_and_their_modes(found, monkeypatch, token):
    assert levels(found("cluster", "token")) == ["note"]  # the Ray of a run makes one
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert levels(found("cluster", "token")) == ["warning"]  # none to show to a cluster
    token(0o600)
    [finding] = found("cluster", "token")
    assert (finding.level, finding.remedy) == (
        "warning",
        "Export RAY_AUTH_MODE=token on this machine and on all nodes",
    )
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert levels(found("cluster", "token")) == ["ok"]
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert levels(found("cluster", "token")) == ["warning"]


def test_a_token_that_others_can_read(found, monkeypatch, token):
    path = token(0o644)
    _, finding = found("cluster", "token")
    assert finding.remedy == f"chmod 600 {path}"
    assert finding.level == "note"  # Ray wrote it
    for name, value in (("RAY_AUTH_TOKEN_PATH", str(path)), ("RAY_ADDRESS", "10.0.0.1:6379")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert found("cluster", "token")[1].level == "warning"
    assert "0123456789abcdef" not in str(found("cluster", "token"))


def test_where_ray_finds_its_token(monkeypatch, token, tmp_path):
    assert run.token_source() is None
    path = token(0o600)
    assert run.token_source() == str(path)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "gone"))
    assert run.token_source() is None
    monkeypatch.setenv("RAY_AUTH_TOKEN", "abc")
    assert run.token_source() == "RAY_AUTH_TOKEN"
