"""Checkpoints of both formats in a run: asynchronous, damaged and lost ones, and a disk that fills up."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from probe_runs import SHARDED, assert_same_weights, numbers_of
from torch.distributed.checkpoint import FileSystemWriter

from rlframework import run
from rlframework.algorithms.checkpoints import checkpoints_in
from rlframework.base.errors import DataError, WorkerLost, WriteError
from rlframework.plugins.configure import config_yaml
from rlframework.policy.client import Policy
from rlframework.runner.launch import resume
from rlframework.runner.parts import build_parts

pytestmark = pytest.mark.slow


def overrides(out: Path, *more: str) -> list[str]:
    validation = "algorithm.validation={at_start: false, at_end: false}"
    return [f"output_dir={out}", "algorithm.num_steps=6", validation, "checkpoints.every=2", *more]


@pytest.fixture(scope="module")
def whole(tiny_llama, tmp_path_factory):
    """The folder of an uninterrupted run, shared by all tests."""
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.mark.parametrize(
    ("before", "after"), [(SHARDED, SHARDED), (SHARDED, ()), ((), SHARDED), (SHARDED[:1], SHARDED[:1])]
)
def test_either_form_is_gone_on_from_without_being_told(run_config, tmp_path, whole, before, after):
    if not whole.exists():
        run(run_config("sft", *overrides(whole)))
    run(run_config("sft", *overrides(tmp_path / "run", *before), "algorithm.num_steps=4"))
    resume(tmp_path / "run", ["algorithm.num_steps=6", "~checkpoints.format", "~checkpoints.asynchronous", *after])
    assert_same_weights(whole, tmp_path / "run")
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == ["step-000004", "step-000006"]
    assert not [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith(".")]


def test_steps_go_on_while_a_checkpoint_is_written(run_config, tmp_path, monkeypatch):
    """Writing waits for the next step, which a blocking save would never reach."""
    write, train = FileSystemWriter.write_data, Policy.train
    next_step, waited = threading.Event(), []

    def slow(self, plan, planner):
        waited.append(next_step.wait(60.0))
        return write(self, plan, planner)

    def step(self, *args, **kwargs):
        result = train(self, *args, **kwargs)
        if (tmp_path / "run" / "checkpoints").exists():
            next_step.set()
        return result

    monkeypatch.setattr(FileSystemWriter, "write_data", slow)
    monkeypatch.setattr(Policy, "train", step)
    run(run_config("sft", *overrides(tmp_path / "run", *SHARDED), "algorithm.num_steps=3"))
    assert waited == [True] * 4  # weights and moments of steps 2 and 3
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == ["step-000002", "step-000003"]


@pytest.mark.parametrize(
    ("error", "left", "told"),
    [
        (RuntimeError("failed on purpose"), ["step-000002"], ""),
        (WorkerLost("rank 1 is gone"), [], "the unfinished checkpoint of step 2 is lost: rank 1 is gone"),
    ],
)
def test_a_run_that_fails_finishes_the_checkpoint_unless_its_workers_are_lost(
    run_config, tmp_path, monkeypatch, caplog, error, left, told
):
    train, calls = Policy.train, []

    def failing(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise error
        return train(self, *args, **kwargs)

    monkeypatch.setattr(Policy, "train", failing)
    with pytest.raises(type(error), match=str(error)):
        run(run_config("sft", *overrides(tmp_path / "run", *SHARDED)))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == left
    assert told in caplog.text


@pytest.mark.parametrize("form", ["portable", "sharded"])
def test_each_file_of_a_checkpoint_that_is_damaged_or_truncated_is_named(run_config, tmp_path, form):
    """In turn: a flipped bit in the middle, a truncated file, an empty file, and a missing file."""
    config = run_config("sft", *overrides(tmp_path / "run", f"checkpoints.format={form}"), "algorithm.num_steps=2")
    run(config)
    [step] = checkpoints_in(tmp_path / "run")
    paths = [path for path in sorted(step.rglob("*")) if path.is_file() and path.parent != step]
    assert len(paths) >= 10
    with build_parts(config) as parts:
        before = parts.policy.get_info()
        for path in paths:
            content = path.read_bytes()
            middle = len(content) // 2
            flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            for broken in (flipped, content[:middle], b"", None):
                path.unlink() if broken is None else path.write_bytes(broken)
                if broken is None and path.name == "checksums.json" and form == "portable":
                    continue  # other programs write none
                told = path.name if broken is not None or path.name != "checksums.json" else path.parent.name
                with pytest.raises(DataError) as caught:
                    parts.policy.load_checkpoint(str(step / "model"), str(step / "optimizer"))
                assert told in str(caught.value), (path, caught.value)
            path.write_bytes(content)
        parts.policy.load_checkpoint(str(step / "model"), str(step / "optimizer"))
        assert before[0]["pid"] == parts.policy.get_info()[0]["pid"]
    for broken in ((step / "run.json").read_bytes()[:-20], b""):
        (step / "run.json").write_bytes(broken)
        with pytest.raises(DataError, match=r"run\.json"):
            resume(tmp_path / "run", ["algorithm.num_steps=6"])


def test_a_random_number_that_changed_in_run_json_is_told(run_config, tmp_path):
    """It is still valid JSON, but the run would continue with other numbers."""
    run(run_config("sft", *overrides(tmp_path / "run"), "algorithm.num_steps=2"))
    [step] = checkpoints_in(tmp_path / "run")
    facts = json.loads((step / "run.json").read_text())
    text = facts["random"]["torch"]
    changed = (step / "run.json").read_text().replace(text, ("0" if text[0] != "0" else "1") + text[1:])
    (step / "run.json").write_text(changed)
    with pytest.raises(DataError, match=r"run\.json is damaged: its contents differ from what was written"):
        resume(tmp_path / "run", ["algorithm.num_steps=6"])


INLINE = "worker_group.name=inline"
PROCESSES = "worker_group={name: processes, num_workers: 2}"
LIMIT = 60_000
"""Bytes of a file (RLIMIT_FSIZE), in place of a full disk: less than the tiny model's tensors, more than others."""


def train(config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rlframework.cli", "train", str(config)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def fill_disk_after_a_checkpoint(process: subprocess.Popen[str], out: Path) -> str:
    """Limit the files of the run's processes as soon as there is a checkpoint; return what the run printed."""
    until = time.monotonic() + 180.0
    while not checkpoints_in(out) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    driver = psutil.Process(process.pid)
    for each in (driver, *driver.children(recursive=True)):
        resource.prlimit(each.pid, resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
    return process.communicate(timeout=180.0)[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "form", "group"),
    [
        ("dtensor", "portable", INLINE),
        ("dtensor", "asynchronous", PROCESSES),
        ("deepspeed", "native", PROCESSES),
        ("megatron", "native", INLINE),
    ],
)
def test_a_checkpoint_that_does_not_fit_ends_the_run_with_one_error(run_config, tmp_path, backend, form, group):
    out, steps = tmp_path / "run", 400
    keys = [f"policy.backend={backend}", group, "plugins=[]", "checkpoints.every=1", "checkpoints.keep_last=1"]
    keys += SHARDED if form == "asynchronous" else [f"checkpoints.format={form}"]
    keys += ["algorithm.validation={at_start: false, at_end: false}", f"output_dir={out}"]
    (tmp_path / "run.yaml").write_text(config_yaml(run_config("sft", *keys, f"algorithm.num_steps={steps}")))
    process = train(tmp_path / "run.yaml")
    printed = fill_disk_after_a_checkpoint(process, out)
    print(printed)
    last = printed.strip().splitlines()[-1]
    assert process.returncode == 1, printed
    assert last.startswith(f"error: cannot write {out}/checkpoints/step-"), printed
    assert f"and a file may have {LIMIT:,}" in last, printed
    assert "Traceback" not in printed
    assert not [path for path in out.rglob("*") if path.name.endswith((".tmp", ".old"))]
    [kept] = checkpoints_in(out)
    more = int(kept.name.removeprefix("step-")) + 1
    resume(out, [f"algorithm.num_steps={more}"])
    run(run_config("sft", *keys, f"algorithm.num_steps={more}", f"output_dir={tmp_path / 'whole'}"))
    assert_same_weights(tmp_path / "whole", out)
    assert numbers_of(tmp_path / "whole").items() <= numbers_of(out).items()


def test_a_folder_that_is_removed_during_the_run_is_one_error(run_config, tmp_path, monkeypatch):
    out, train = tmp_path / "run", Policy.train

    def removing(self, *args, **kwargs):
        shutil.rmtree(out)
        return train(self, *args, **kwargs)

    monkeypatch.setattr(Policy, "train", removing)
    with pytest.raises(WriteError, match=f"{out} was removed or moved during the run"):
        run(run_config("sft", f"output_dir={out}", "checkpoints.every=1", "observers.jsonl=false"))
    assert not (out / "checkpoints").exists()
