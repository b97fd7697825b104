"""Checks of a configuration's run and of the cluster: addresses, tokens and machines, each made up."""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path

import pytest
from probe_findings import GIB, levels

from rlframework.generation.engine_environment import ProbeError
from rlframework_tools.doctor import run
from rlframework_tools.doctor.checks import Context

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


def test_without_a_configuration_that_loads_only_that_is_told(found, tmp_path):
    (tmp_path / "run.yaml").write_text("sed: 1\n")
    context = Context(str(tmp_path / "run.yaml"))
    [finding] = found("run", "configuration", context)
    assert finding.level == "broken"
    assert "Did you mean `seed`" in finding.text
    for name in ("model", "estimate", "workers", "python of the workers"):
        assert found("run", name, context) == [], name


@pytest.mark.slow
def test_the_estimate_is_that_of_a_dry_run(found, with_config, monkeypatch, tmp_path):
    memory, disk, note = found("run", "estimate", with_config())
    assert "policy.optimizer.lr is not set" in note.text
    assert memory.level == "ok"
    # two layers (attention 2 x 32 x 32 + 2 x 32 x 16, 3 x 32 x 128, two norms), a norm, 48 tokens x 32
    assert f"{2 * (3_072 + 12_288 + 64) + 32 + 48 * 32:,} parameters; a worker needs about 0." in memory.text
    assert disk.text.startswith("disk in GiB: trained model <0.001")
    monkeypatch.setattr("rlframework_tools.estimates.estimate.available_memory", lambda: 1000)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    first, second = [one for one in found("run", "estimate", with_config()) if one.level == "warning"]
    assert {first.text[:11], second.text[:11]} == {"the run may", "output_dir="}
    assert "Take another output_dir, or move them away" in (first.remedy, second.remedy)


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_weights_that_are_there(found, with_config):
    [finding] = found("run", "model", with_config())
    assert finding.level == "ok"
    assert "1 weight file(s)" in finding.text


def test_a_model_without_weights_and_one_with_a_part_of_them(found, with_config, folder):
    context = with_config(f"policy.model_name={folder}")
    assert levels(found("run", "model", context)) == ["broken"]
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "model-1.safetensors").touch()
    [finding] = found("run", "model", context)
    assert finding.text == f"{folder}: 1 of 2 weight files are missing, such as model-2.safetensors"
    (folder / "model-2.safetensors").touch()
    assert levels(found("run", "model", context)) == ["ok"]


def test_a_name_on_the_hub_is_looked_for_in_the_cache_and_then_there(found, with_config, monkeypatch, folder):
    context = with_config("policy.model_name=someone/some-model")
    monkeypatch.setattr(run, "_cached", lambda name: None)
    assert found("run", "model", context) == []  # the tests run offline
    assert levels(found("run", "estimate", context)) == ["broken"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert found("run", "model", context) == []
    [finding] = found("run", "estimate", context)
    assert finding.level == "broken"
    assert "http://127.0.0.1:1 cannot be reached" in finding.text
    monkeypatch.setattr(run, "hub_problem", lambda: None)
    [finding] = found("run", "model", context)
    assert finding.text.endswith("will be downloaded from http://127.0.0.1:1")
    monkeypatch.setattr(run, "_cached", lambda name: folder)
    (folder / "model.safetensors").touch()
    assert levels(found("run", "model", context)) == ["ok"]


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count", "level"),
    [("processes", 2, "ok"), ("processes", 4, "warning"), ("ray", 4, "broken"), ("ray", 2, "ok")],
)
def test_cores_for_the_workers(found, with_config, monkeypatch, name, count, level):
    monkeypatch.setattr(run, "cpu_count", lambda: 2)
    context = with_config(f"worker_group.name={name}", f"worker_group.num_workers={count}")
    assert levels(found("run", "workers", context)) == [level]


def test_gpus_for_the_workers(found, with_config, monkeypatch):
    monkeypatch.setattr("rlframework.observers.host.gpus", lambda: [object()])
    context = with_config("worker_group.name=processes", "worker_group.num_workers=2", "device=cuda")
    [finding] = found("run", "workers", context)
    assert (finding.level, finding.remedy) == ("broken", "Set it to at most 1, or provide more GPUs")


def test_workers_on_a_cluster_are_held_against_its_nodes(found, with_config, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(run, "cluster_nodes", lambda context: [{"cpus": 2.0, "gpus": 0.0}] * 3)
    context = with_config("worker_group.name=ray", "worker_group.num_workers=6")
    [finding] = found("run", "workers", context)
    assert finding.level == "ok"
    assert finding.text == "worker_group.num_workers=6, with 6 core(s) available in 3 node(s) of the cluster"
    three = with_config("worker_group={name: ray, num_workers: 3, workers_per_node: 3}")
    assert levels(found("run", "workers", three)) == ["broken"]  # no machine has three
    monkeypatch.setattr(run, "cluster_nodes", lambda context: None)
    assert found("run", "workers", context) == []


def test_a_driver_without_a_gpu_takes_a_cluster_with_gpus_for_one_without(found, with_config, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(run, "cluster_nodes", lambda context: [{"cpus": 2.0, "gpus": 0.0}, {"cpus": 2.0, "gpus": 8.0}])
    monkeypatch.setattr(
        "rlframework.plugins.configure.resolve_device", lambda device: "cpu" if device == "auto" else device
    )
    _, finding = found("run", "workers", with_config("worker_group.name=ray", "device=auto"))
    assert (finding.level, finding.remedy) == ("warning", "Set device=cuda")
    assert levels(found("run", "workers", with_config("worker_group.name=ray", "device=cuda"))) == ["ok"]


@pytest.mark.slow
def test_another_python_must_have_the_same_versions(found, with_config, tmp_path):
    ray = "worker_group.name=ray"
    assert found("run", "python of the workers", with_config(ray)) == []
    same = with_config(ray, f"worker_group.python={sys.executable}")
    assert levels(found("run", "python of the workers", same)) == ["ok"]
    other = tmp_path / "python"
    other.write_text('#!/bin/sh\necho \'["3.9.1", "2.40.0"]\'\n')
    other.chmod(0o755)
    [finding] = found("run", "python of the workers", with_config(ray, f"worker_group.python={other}"))
    assert finding.level == "broken"
    assert f"{other} has Python 3.9.1 and Ray 2.40.0; the driver has 3." in finding.text
    gone = with_config(ray, f"worker_group.python={tmp_path / 'gone'}")
    assert levels(found("run", "python of the workers", gone)) == ["broken"]
    engines = with_config("generation.workers.group=ray", f"generation.workers.python={other}")
    [finding] = found("run", "python of the workers", engines)
    assert finding.text.startswith(f"the generation engines' Python {other} has Python 3.9.1 and Ray 2.40.0")
