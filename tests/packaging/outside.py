"""From the outside, for `make outside`: what a stranger gets from wheels alone, in empty environments off this tree.

The example of a third-party backend against the suite, and the quickstart's configuration on each of our backends. What
wheels hold, and that core works without most plugins, is in `test_wheels.py`; this takes minutes. A package index is
needed once, to collect the dependencies in a folder as docs/install.md says. Everything after that, installation
included, runs without a network where Linux allows a process to have none of its own.
"""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
import venv
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = runpy.run_path(str(Path(__file__).with_name("test_wheels.py")))
run, pip_for, PIP = HERE["run"], HERE["pip_for"], HERE["PIP"]
wheels = HERE["wheels"]
"""The fixture of `test_wheels.py`."""
ALONE = """
import fcntl, os, socket, struct, sys
SIOCSIFFLAGS, UP_AND_LOOPBACK = 0x8914, 0x1 | 0x8
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", UP_AND_LOOPBACK, bytes(14)))
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Program that starts the loopback device of an empty network namespace and becomes the command of its arguments."""
BACKENDS = ("dtensor", "deepspeed", "megatron")
ONE_STEP = ["sft:algorithm.num_steps=2", "grpo:algorithm.num_steps=2", "grpo:policy.scheduler.warmup_steps=0"]
SMALL = ["sft:policy.scheduler.warmup_steps=0", "algorithm.validation.samples=8", "observers.console=false"]

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def wheelhouse(wheels, tmp_path_factory) -> Path:
    """A folder with the wheels of all distributions, and of everything that they depend on."""
    core, house = wheels["rlframework-core"], tmp_path_factory.mktemp("wheelhouse")
    wanted = f"rlframework-core[all] @ {core.as_uri()}"
    run(*PIP, "wheel", "--quiet", "-w", house, "--find-links", core.parent, wanted, cwd=house, minutes=20)
    return house


@cache
def without_network() -> tuple[str, ...]:
    """The words before a command that give it no network but the loopback device; none if the machine forbids that."""
    words = ("unshare", "--map-root-user", "--net", sys.executable, "-c", ALONE)
    allowed = shutil.which("unshare") is not None and subprocess.run([*words, "true"], check=False).returncode == 0
    return words if allowed else ()


def run_alone(*command: str | Path, cwd: Path, minutes: float = 1) -> str:
    """Standard output of a command that has no network."""
    return run(*without_network(), *command, cwd=cwd, minutes=minutes)


def environment(home: Path, house: Path, *wanted: str | Path) -> Path:
    """The `bin` of a new environment with `wanted`, from the folder `house` and nowhere else."""
    venv.create(home)
    words = ("install", "--quiet", "--no-compile", "--no-index", "--find-links", house)
    run_alone(*pip_for(home), *words, *wanted, cwd=home, minutes=15)
    run(*pip_for(home), "check", cwd=home)
    return home / "bin"


def plugins(commands: Path, folder: Path) -> list[dict[str, str]]:
    """The rows of `rlframework plugins` in an environment."""
    rows: list[dict[str, str]] = json.loads(run_alone(commands / "rlframework", "plugins", "--json", cwd=folder))
    return rows


def backends(commands: Path, folder: Path) -> dict[str, str]:
    """The status of each training backend that an environment lists."""
    return {row["name"]: row["status"] for row in plugins(commands, folder) if row["kind"] == "policy_worker"}


def error_of(*command: str | Path, cwd: Path) -> str:
    """The error that a command prints as it fails."""
    done = subprocess.run([*without_network(), *command], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0, done.stdout
    return done.stderr


def test_nothing_is_reached_without_a_network(tmp_path):
    if not without_network():
        pytest.skip("the machine does not permit `unshare --net`, so these tests use its network")
    reach = "import socket; print(socket.create_connection(('192.0.2.1', 9), timeout=1))"
    with pytest.raises(AssertionError, match="Network is unreachable"):
        run_alone(sys.executable, "-c", reach, cwd=tmp_path)


def test_the_example_of_a_backend_conforms(wheelhouse, tmp_path):
    example = ROOT / "examples" / "ddp_backend"
    run(*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, example, cwd=tmp_path, minutes=5)
    commands = environment(tmp_path / "empty", wheelhouse, "rlframework-core[conformance]", *tmp_path.glob("*.whl"))
    assert backends(commands, tmp_path) == {"ddp": "active"}
    printed = run_alone(commands / "rlframework", "conformance", "ddp", "--layout", "data=1", cwd=tmp_path, minutes=20)
    [verdict] = [line.split() for line in printed.splitlines() if line.startswith("ddp ")]
    assert verdict[:4] == ["ddp", "PolicyWorkerSuite", "data=1", "CONFORMANT"], verdict
    assert "except" not in verdict
    print(" ".join(verdict))


def test_the_quickstart_runs_on_each_backend(wheelhouse, tmp_path):
    commands = environment(tmp_path / "empty", wheelhouse, f"rlframework-core[{','.join(BACKENDS)}]")
    assert backends(commands, tmp_path) == dict.fromkeys(BACKENDS, "active")
    quickstart = Path(shutil.copytree(ROOT / "examples" / "quickstart", tmp_path / "quickstart")) / "run.py"
    for backend in BACKENDS:
        own = [f"policy.backend={backend}", "worker_group.name=processes"]
        printed = run_alone(
            *(commands / "python", quickstart, "--output", tmp_path / backend, *ONE_STEP, *SMALL, *own),
            cwd=tmp_path,
            minutes=15,
        )
        lines = [line for line in printed.splitlines() if "held-out accuracy" in line]
        assert [line.split()[0] for line in lines] == ["sft", "grpo"], printed
        assert (tmp_path / backend / "seed-0" / "grpo" / "model" / "model.safetensors").is_file()
        print(backend, *lines, sep="\n")


def test_core_with_one_backend_names_what_it_lacks_and_all_brings_it(wheelhouse, tmp_path):
    """As a newcomer: the README's extra first, and `[all]` into the same environment when something is missing."""
    commands = environment(tmp_path / "empty", wheelhouse, "rlframework-core[dtensor]")
    active = {row["distribution"] for row in plugins(commands, tmp_path)}
    assert active == set(HERE["FIRST_RUN"])
    config = tmp_path / "run.yaml"
    config.write_text("algorithm: {name: grpo, num_steps: 1}\nenvironment: {name: addition}\npolicy: {model_name: m}\n")
    missing = {"ray": "worker_group.name=ray", "vllm": "generation.name=vllm", "megatron": "policy.backend=megatron"}
    for extra, override in missing.items():
        message = error_of(commands / "rlframework", "config", config, override, cwd=tmp_path)
        assert f"pip install 'rlframework-core[{extra}]'" in message, message
    message = error_of(commands / "rlframework", "conformance", "dtensor", cwd=tmp_path)
    assert "pip install 'rlframework-core[conformance]'" in message, message
    words = ("install", "--quiet", "--no-compile", "--no-index", "--find-links", wheelhouse)
    run_alone(*pip_for(commands.parent), *words, "rlframework-core[all]", cwd=tmp_path, minutes=15)
    rows = plugins(commands, tmp_path)
    assert {row["distribution"] for row in rows} == set(HERE["SOURCES"])
    assert {row["status"] for row in rows} == {"active"}, rows
