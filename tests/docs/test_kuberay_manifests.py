"""examples/cluster/kuberay: the manifests agree with each other, docs/cluster.md, the Dockerfile and the CLI."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from rlframework import load_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster" / "kuberay"
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")


def manifests(name: str) -> dict[str, dict]:
    """The objects of a file by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))}


COMMON, CLUSTER, JOB = (manifests(f"{name}.yml") for name in ("common", "raycluster", "rayjob"))
SPECS = {"raycluster": CLUSTER["RayCluster"]["spec"], "rayjob": JOB["RayJob"]["spec"]["rayClusterSpec"]}
SCRIPT = JOB["ConfigMap"]["data"]["train.sh"]


def pods(spec: dict) -> list[dict]:
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


@pytest.mark.parametrize("name", SPECS)
def test_every_pod_has_the_image_the_shared_volume_and_shared_memory(name):
    assert SPECS[name]["authOptions"] == {"mode": "token"}
    for pod in pods(SPECS[name]):
        [container] = pod["spec"]["containers"]
        assert container["image"] == "registry.example.com/rlframework:0.2.0"
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert {"shared": "/shared", "shm": "/dev/shm"}.items() <= mounts.items()
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        assert volumes.keys() == mounts.keys()
        claim = volumes["shared"]["persistentVolumeClaim"]["claimName"]
        assert claim == COMMON["PersistentVolumeClaim"]["metadata"]["name"]
        assert (
            COMMON["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        )


@pytest.mark.parametrize("name", SPECS)
def test_the_cluster_has_the_gpus_of_run_yaml(name):
    group = yaml.safe_load((ROOT / "examples/cluster/run.yaml").read_text())["worker_group"]
    [workers] = SPECS[name]["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == group["workers_per_node"]
    assert workers["replicas"] * limits["nvidia.com/gpu"] == group["num_workers"]
    assert workers["minReplicas"] == workers["maxReplicas"] == workers["replicas"]


def test_the_ports_are_those_of_the_page():
    table = {int(port) for port in re.findall(r"^\| (\d+)[ ,]", PAGE, re.MULTILINE)}
    policy = [port["port"] for rule in COMMON["NetworkPolicy"]["spec"]["ingress"] for port in rule.get("ports", [])]
    assert set(policy) <= table
    for spec in SPECS.values():
        [head] = spec["headGroupSpec"]["template"]["spec"]["containers"]
        opened = {port["containerPort"] for port in head["ports"]}
        assert opened == {6379, 8265} <= set(policy)


def test_the_job_runs_its_script_which_trains_or_resumes():
    [head] = SPECS["rayjob"]["headGroupSpec"]["template"]["spec"]["containers"]
    folder = next(each["mountPath"] for each in head["volumeMounts"] if each["name"] == "train")
    assert JOB["RayJob"]["spec"]["entrypoint"] == f"bash {folder}/train.sh"
    subprocess.run(["bash", "-n"], input=SCRIPT, text=True, check=True)
    calls = re.findall(r"rlframework (\w+) (.*)", SCRIPT)
    assert [command for command, _ in calls] == ["train", "doctor", "train"]
    assert calls[0][1] == "--resume /shared/runs/cluster"
    assert calls[1][1] == calls[2][1]
    config, *overrides = calls[2][1].split()
    assert config == "/shared/run.yaml"
    assert f"`{config}`" in PAGE
    loaded = load_config(ROOT / "examples" / "cluster" / "run.yaml", overrides)
    assert (str(loaded.output_dir), loaded.worker_group.name, loaded.device) == ("/shared/runs/cluster", "ray", "cuda")
    assert 'compgen -G "/shared/runs/cluster/checkpoints/step-*"' in SCRIPT
    for file in re.findall(r"-f (examples/\S+)", PAGE):
        assert (ROOT / file).is_file()
    assert "'ray[default]'" in (ROOT / "Dockerfile").read_text()  # the dashboard, which the operator talks to
