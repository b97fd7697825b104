"""The worker group that `worker_group.name=ray` selects, beyond what `test_remote_groups` shows of both groups."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlframework.base.errors import ConfigError
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers import machine
from rlframework_ray.configured_group import ConfiguredRayWorkerGroup
from rlframework_ray.plugin import RayGroupConfig

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_session")]


def start(workers, target="probe_workers:Probe", **settings):
    config = RayGroupConfig(name="ray", num_workers=workers, **settings)
    sharding = NamedSharding(list(range(workers)), ["data_parallel"])
    return ConfiguredRayWorkerGroup(WorkerSpec(target, {}), config, sharding=sharding, device="cpu")


def test_only_named_variables_are_passed_and_torch_is_not_imported(monkeypatch):
    monkeypatch.setenv("NAMED", "from the driver")
    monkeypatch.setenv("NOT_NAMED", "from the driver")  # set after Ray was started: not inherited from it
    group = start(1, pass_environment=("NAMED", "NOT_THERE"), environment={"GIVEN": "a value"})
    (who,) = group.get_all_worker_results(group.run_all_workers_single_data("who"))
    found = {name: who["environment"].get(name) for name in ("NAMED", "NOT_NAMED", "NOT_THERE", "GIVEN")}
    assert found == {"NAMED": "from the driver", "NOT_NAMED": None, "NOT_THERE": None, "GIVEN": "a value"}
    assert who["environment"]["OMP_NUM_THREADS"] == str(machine.threads_per_worker(1))
    assert who["torch_imported"] is False
    assert group.shutdown()


def test_what_the_machine_cannot_run_is_rejected_before_anything_starts():
    with pytest.raises(ConfigError, match=r"worker_group\.python=/no/such/python is not an executable"):
        start(1, python="/no/such/python")
    spec, sharding = WorkerSpec("m:C", {}, py_executable="no/such/python"), NamedSharding([0], ["data_parallel"])
    there = Path.cwd() / "no" / "such" / "python"
    with pytest.raises(ConfigError, match=rf"generation\.workers\.python, or .*={there} is not an executable"):
        ConfiguredRayWorkerGroup(spec, RayGroupConfig(name="ray"), sharding=sharding, device="cpu")
    with pytest.raises(ConfigError, match=rf"worker_group\.python={Path.home()}/no/such is not an executable"):
        start(1, python="~/no/such")
    workers = machine.cpu_count() + 1
    with pytest.raises(ConfigError, match=rf"num_workers={workers}, but this process may use {workers - 1} CPU core"):
        start(workers)


DRIVER = """
import sys
sys.path.append({folder!r})
from rlframework.config.sections import WorkerGroupConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework_ray import runtime
from rlframework_ray.configured_group import ConfiguredRayWorkerGroup
from rlframework.interfaces.worker_group import WorkerSpec

group = ConfiguredRayWorkerGroup(
    WorkerSpec("probe_workers:Probe", {{}}),
    WorkerGroupConfig(name="ray", num_workers=1),
    sharding=NamedSharding([0], ["data_parallel"]),
    device="cpu",
)
print(runtime._PRIVATE[0].folder, flush=True)
group.get_all_worker_results(group.run_all_workers_single_data("sleep", seconds=600))
"""


def processes_of_session(session):
    """Command lines of what still runs in a session of processes."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.cmdline())
    return found


def test_nothing_outlives_a_killed_driver():
    """A driver of its own, which starts its own Ray."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(folder=str(Path(__file__).parents[3] / "tests" / "workers"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    told = driver.stdout.readline()
    if not told:  # say why, and let go of its pipes, or the tests after this one fail with it
        pytest.fail(f"the driver ended early:\n{driver.communicate(timeout=60)[1][-3000:]}")
    folder = Path(told.strip())
    assert folder.exists()
    time.sleep(0.3)
    driver.kill()
    driver.communicate(timeout=60)
    until = time.monotonic() + 60
    while (left := [processes_of_session(driver.pid), folder.exists()]) != [[], False] and time.monotonic() < until:
        time.sleep(0.1)
    assert left == [[], False]
