"""From the outside, for `make outside`: what a stranger gets from wheels alone, in empty environments off this tree.

The example of a third-party backend against the suite, and the quickstart's configuration on each of our backends. What
wheels hold, and that core works without most plugins, is in `test_wheels.py`; this takes minutes, and
needs a package index for the dependencies.
"""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = runpy.run_path(str(Path(__file__).with_name("test_wheels.py")))
run, pip_for = HERE["run"], HERE["pip_for"]
wheels = HERE["wheels"]
"""The fixture of `test_wheels.py`."""
BACKENDS = ("dtensor", "deepspeed", "megatron")
ONE_STEP = ["sft:algorithm.num_steps=2", "grpo:algorithm.num_steps=2", "grpo:policy.scheduler.warmup_steps=0"]
SMALL = ["sft:policy.scheduler.warmup_steps=0", "algorithm.validation.samples=8", "observers.console=false"]

pytestmark = pytest.mark.timeout(1800)


def environment(home: Path, links: Path, *wanted: str) -> Path:
    """The `bin` of a new environment with `wanted`, whose rlframework parts come from `links` and nowhere else."""
    venv.create(home)
    run(*pip_for(home), "install", "--quiet", "--no-compile", "--find-links", links, *wanted, cwd=home, minutes=15)
    run(*pip_for(home), "check", cwd=home)
    return home / "bin"


def backends(commands: Path, folder: Path) -> dict[str, str]:
    """The status of each training backend that an environment lists."""
    rows = json.loads(run(commands / "rlframework", "plugins", "--json", cwd=folder))
    return {row["name"]: row["status"] for row in rows if row["kind"] == "policy_worker"}


def test_the_example_of_a_backend_conforms(wheels, tmp_path):
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    example = ROOT / "examples" / "ddp_backend"
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, example, cwd=tmp_path, minutes=5)
    core = wheels["rlframework-core"]
    wanted = [f"rlframework-core[conformance] @ {core.as_uri()}", *map(str, tmp_path.glob("*.whl"))]
    commands = environment(tmp_path / "empty", core.parent, *wanted)
    assert backends(commands, tmp_path) == {"ddp": "active"}
    printed = run(commands / "rlframework", "conformance", "ddp", "--layout", "data=1", cwd=tmp_path, minutes=20)
    [verdict] = [line.split() for line in printed.splitlines() if line.startswith("ddp ")]
    assert verdict[:4] == ["ddp", "PolicyWorkerSuite", "data=1", "CONFORMANT"], verdict
    assert "except" not in verdict
    print(" ".join(verdict))


def test_the_quickstart_runs_on_each_backend(wheels, tmp_path):
    core = wheels["rlframework-core"]
    wanted = f"rlframework-core[{','.join(BACKENDS)}] @ {core.as_uri()}"
    commands = environment(tmp_path / "empty", core.parent, wanted)
    assert backends(commands, tmp_path) == dict.fromkeys(BACKENDS, "active")
    quickstart = Path(shutil.copytree(ROOT / "examples" / "quickstart", tmp_path / "quickstart")) / "run.py"
    for backend in BACKENDS:
        own = [f"policy.backend={backend}", "worker_group.name=processes"]
        printed = run(
            *(commands / "python", quickstart, "--output", tmp_path / backend, *ONE_STEP, *SMALL, *own),
            cwd=tmp_path,
            minutes=5,
        )
        lines = [line for line in printed.splitlines() if "held-out accuracy" in line]
        assert [line.split()[0] for line in lines] == ["sft", "grpo"], printed
        assert (tmp_path / backend / "seed-0" / "grpo" / "model" / "model.safetensors").is_file()
        print(backend, *lines, sep="\n")
