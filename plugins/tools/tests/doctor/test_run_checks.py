"""The checks of a configuration's run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from probe_findings import levels

from rlframework_tools.doctor import run
from rlframework_tools.doctor.checks import Context


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


@pytest.mark.slow
@pytest.mark.parametrize("key", ["worker_group", "generation.workers"])
def test_another_python_is_found_as_workers_find_it(found, with_config, tmp_path, monkeypatch, key):
    other = tmp_path / "home" / "envs" / "python"
    other.parent.mkdir(parents=True)
    other.write_text('#!/bin/sh\necho \'["3.9.1", "2.40.0"]\'\n')
    other.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home")
    for given in ("~/envs/python", "envs/python", "./envs/python"):
        context = with_config("worker_group.name=ray", "generation.workers.group=ray", f"{key}.python={given}")
        [finding] = found("run", "python of the workers", context)
        assert f" Python {other} has Python 3.9.1" in finding.text
