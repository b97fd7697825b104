"""A disk that fills up during a run: one error that names path and bytes, and a resume with the same numbers.

The limit of a file's size (RLIMIT_FSIZE) stands in for the disk: writes beyond it fail with EFBIG.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from probe_runs import SHARDED, assert_same_weights, numbers_of

from rlframework import run
from rlframework.algorithms.checkpoints import checkpoints_in
from rlframework.base.errors import WriteError
from rlframework.plugins.configure import config_yaml
from rlframework.policy.client import Policy
from rlframework.runner.launch import resume

pytestmark = pytest.mark.slow

INLINE = "worker_group.name=inline"
PROCESSES = "worker_group={name: processes, num_workers: 2}"
LIMIT = 60_000
"""Less than the tensors of the tiny model, more than each other file."""


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
