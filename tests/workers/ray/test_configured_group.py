"""The Ray worker group with two processes. One group serves all tests that leave it usable."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.sections import DeadlinesConfig, RayGroupConfig, WorkerGroupConfig
from rlframework.errors import (
    BatchError,
    ConfigError,
    DeadlineExceeded,
    WorkerError,
    WorkerLost,
)
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers import machine
from rlframework.workers.ray.configured_group import ConfiguredRayWorkerGroup

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_session")]

TWO = NamedSharding([0, 1], ["data_parallel"])


def start(sharding=TWO, target="probe_workers:Probe", spec=None, **deadlines):
    config = WorkerGroupConfig(name="ray", num_workers=sharding.size, deadlines=DeadlinesConfig(**deadlines))
    return ConfiguredRayWorkerGroup(spec or WorkerSpec(target, {"word": "hi"}), config, sharding=sharding, device="cpu")


def ask(group, method, **kwargs):
    return group.get_all_worker_results(group.run_all_workers_single_data(method, **kwargs))


def running(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


@pytest.fixture(scope="module")
def group(ray_session):
    group = start()
    yield group
    assert group.shutdown("shutdown")


@pytest.fixture
def fresh():
    """`fresh(**deadlines)`: a group for a test that ends it; its processes must be gone when the test is over."""
    groups = []

    def make(**deadlines):
        groups.append(start(**deadlines))
        return groups[-1]

    yield make
    for group in groups:
        group.shutdown()


def test_workers_get_their_context(group):
    answers = ask(group, "who")
    assert [(a["rank"], a["world_size"], a["device"], a["word"]) for a in answers] == [
        (0, 2, "cpu", "hi"),
        (1, 2, "cpu", "hi"),
    ]
    assert len({a["pid"] for a in answers} | {os.getpid()}) == 3
    assert all(a["address"] == "127.0.0.1" for a in answers)
    assert all(a["threads"] == machine.threads_per_worker(2) for a in answers)
    assert group.sharding == TWO


def test_only_named_variables_are_passed_and_torch_is_not_imported(group, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_DRIVER", "x")  # set after Ray was started: not inherited from it
    answers = ask(group, "who")
    for answer in answers:
        assert "SECRET_OF_THE_DRIVER" not in answer["environment"]
        assert answer["environment"]["OMP_NUM_THREADS"] == str(machine.threads_per_worker(2))
        assert answer["torch_imported"] is False


def test_gloo_at_the_address_of_the_context(group):
    assert group.get_all_worker_results(
        group.run_all_workers_sharded_data("all_reduce", in_sharded_axes=["data_parallel"], value=[3.0, 4.0])
    ) == [7.0, 7.0]
    # all_gather of batches, whose group is the one just formed: 2 rows and 1 row, lists of dictionaries, bool, bf16
    batches = [
        BatchedDataDict(ids=torch.tensor([[1, 2], [3, 4]]), ok=torch.tensor([True, False]), note=["a", "b"]),
        BatchedDataDict(ids=torch.tensor([[5, 6]]), ok=torch.tensor([True]), note=[{"c": 1}]),
    ]
    future = group.run_all_workers_sharded_data("gather_batch", in_sharded_axes=["data_parallel"], batch=batches)
    for gathered in group.get_all_worker_results(future):
        assert isinstance(gathered, BatchedDataDict)
        assert torch.equal(gathered["ids"], torch.tensor([[1, 2], [3, 4], [5, 6]]))
        assert torch.equal(gathered["ok"], torch.tensor([True, False, True]))
        assert gathered["note"] == ["a", "b", {"c": 1}]


def test_a_failing_rank_ends_the_call_at_once(fresh):
    group = fresh()
    pids = [answer["pid"] for answer in ask(group, "who")]
    begun = time.monotonic()
    with pytest.raises(
        WorkerError, match=r"^rank 1 of 2 on node \S+ failed in fail: Plain: bad thing on 1\n"
    ) as caught:
        ask(group, "fail", kind="Plain", only=1)  # rank 0 sleeps for a minute
    assert time.monotonic() - begun < 10
    assert "in fail\n" in str(caught.value)
    assert "probe_workers.py" in str(caught.value)
    assert running(pids) == []
    with pytest.raises(WorkerError, match="who: the worker group is no longer usable: fail ended with WorkerError"):
        ask(group, "who")
    assert group.shutdown("shutdown") is True


def test_rlframework_errors_keep_their_class(fresh, monkeypatch):
    monkeypatch.delitem(sys.modules, "probe_errors", raising=False)
    with pytest.raises(BatchError) as caught:
        ask(fresh(), "fail", kind="Special")
    assert str(caught.value) == "bad thing on 0"
    assert type(caught.value) is BatchError  # the nearest class that the driver knows
    assert f"raised by rank 0 of 2 on node {platform.node()} in fail" in caught.value.__notes__
    assert "probe_errors" not in sys.modules


def test_the_dead_rank_is_named_not_the_peer_that_noticed(fresh):
    group = fresh()
    ask(group, "all_reduce", value=1)
    with pytest.raises(WorkerError, match=r"^the process of rank 1 of 2 on node \S+ died in wait_for_peer: "):
        ask(group, "wait_for_peer", only=1)


def test_a_worker_killed_from_outside_is_reported_immediately(fresh):
    group = fresh()
    pids = [answer["pid"] for answer in ask(group, "who")]
    future = group.run_all_workers_single_data("sleep", seconds=60)
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(WorkerLost, match=rf"^the process of rank 1 of 2 on node {platform.node()} died in sleep: "):
        group.get_all_worker_results(future)
    assert time.monotonic() - begun < 5
    assert running(pids) == []


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("probe_broken_module", "RuntimeError: this module is broken on purpose"),
        ("probe_cannot_import", "ModuleNotFoundError: No module named 'a_module_that_is_nowhere'"),
    ],
)
def test_a_failing_import_is_reported_with_its_traceback(ray_session, module, message):
    with pytest.raises(WorkerError, match=message) as caught:
        start(target=f"{module}:Anything")
    told = "".join(traceback.format_exception(caught.value))
    assert f"rank 0 of 2 on node {platform.node()}" in told
    assert f'{module}.py", line 3' in told
    assert module not in sys.modules


def test_a_missing_python_is_rejected_before_anything_starts(probe_spec, line):
    config = RayGroupConfig(name="ray", num_workers=1, python="/no/such/python")
    with pytest.raises(ConfigError, match=r"worker_group\.python=/no/such/python is not an executable"):
        ConfiguredRayWorkerGroup(probe_spec(), config, sharding=line(1), device="cpu")


def test_named_variables_reach_the_workers(probe_spec, line, monkeypatch, ray_session):
    monkeypatch.setenv("NAMED", "from the driver")
    monkeypatch.setenv("NOT_NAMED", "from the driver")
    config = RayGroupConfig(
        name="ray", num_workers=1, pass_environment=("NAMED", "NOT_THERE"), environment={"GIVEN": "a value"}
    )
    group = ConfiguredRayWorkerGroup(probe_spec(), config, sharding=line(1), device="cpu")
    (who,) = ask(group, "who")
    found = {name: who["environment"].get(name) for name in ("NAMED", "NOT_NAMED", "NOT_THERE", "GIVEN")}
    assert found == {"NAMED": "from the driver", "NOT_NAMED": None, "NOT_THERE": None, "GIVEN": "a value"}
    assert group.shutdown()


def test_the_standard_error_of_a_dead_process_is_reported(fresh):
    with pytest.raises(WorkerError, match="last words of the dying"):
        ask(fresh(), "die", only=0)


def test_deadline(fresh):
    group = fresh(call=1.5)
    pids = [answer["pid"] for answer in ask(group, "who")]
    with pytest.raises(
        DeadlineExceeded,
        match=r"^sleep: no answer within 1\.5 s from rank 1 of 2 on node \S+; answered: 0\. .*group\.deadlines\.call$",
    ):
        ask(group, "sleep", seconds=60, only=1)
    assert running(pids) == []


def test_more_workers_than_cores(probe_spec, group_config, line):
    workers = machine.cpu_count() + 1
    with pytest.raises(ConfigError, match=rf"num_workers={workers}, but this process may use {workers - 1} CPU core"):
        ConfiguredRayWorkerGroup(probe_spec(), group_config("ray", workers), sharding=line(workers), device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_more_workers_than_gpus(probe_spec, group_config, line, ray_session):
    with pytest.raises(ConfigError, match=r"num_workers=1 on device cuda, but there are 0 GPU\(s\)"):
        ConfiguredRayWorkerGroup(probe_spec(), group_config("ray", 1), sharding=line(1), device="cuda")


def test_ranks_must_be_those_of_a_group(probe_spec, group_config):
    sharding = NamedSharding([1, 2], ["data_parallel"])
    with pytest.raises(ValueError, match=r"the sharding must hold the ranks 0\.\.1"):
        ConfiguredRayWorkerGroup(probe_spec(), group_config("ray", 2), sharding=sharding, device="cpu")


DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has programs in the background ignore Ctrl-C
sys.path.append({folder!r})
from rlframework.config.sections import WorkerGroupConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.workers.ray.configured_group import ConfiguredRayWorkerGroup
from rlframework.interfaces.worker_group import WorkerSpec

group = ConfiguredRayWorkerGroup(
    WorkerSpec("probe_workers:Probe", {{}}),
    WorkerGroupConfig(name="ray", num_workers=1),
    sharding=NamedSharding([0], ["data_parallel"]),
    device="cpu",
)
(who,) = group.get_all_worker_results(group.run_all_workers_single_data("who"))
print(who["pid"], flush=True)
group.get_all_worker_results(group.run_all_workers_single_data("sleep", seconds=60))
"""


def processes_of_session(session):
    """Command lines of what still runs in a session of processes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((folder / "cmdline").read_text())
    return found


def test_ctrl_c_ends_the_workers_and_their_ray():
    """A driver of its own, which starts and so must end its own Ray."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(folder=str(Path(__file__).parents[1]))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    told = driver.stdout.readline()
    if not told:  # say why, and let go of its pipes, or the tests after this one fail with it
        pytest.fail(f"the driver ended early:\n{driver.communicate(timeout=30)[1][-3000:]}")
    pid = int(told)
    assert running([pid]) == [pid]
    time.sleep(0.3)
    driver.send_signal(signal.SIGINT)
    try:
        _, errors = driver.communicate(timeout=30)
    except subprocess.TimeoutExpired:  # end it and its pipes, or the tests after this one fail with it
        driver.kill()
        driver.communicate()
        raise
    assert "KeyboardInterrupt" in errors.splitlines()[-1]
    assert driver.returncode == -signal.SIGINT
    assert running([pid]) == []
    assert processes_of_session(driver.pid) == []
