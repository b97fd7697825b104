from __future__ import annotations

import subprocess
import sys
import threading
import traceback

import pytest

from rlframework.base.errors import ConfigError, PluginError
from rlframework.config.sections import WorkerGroupConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers.dispatch import InlineWorkerGroup

ONE = NamedSharding([[0]], ["data_parallel", "tensor_parallel"])


def start(target="probe_workers:Probe", workers=1, **spec):
    sharding = ONE if workers == 1 else NamedSharding(list(range(workers)), ["data_parallel"])
    config = WorkerGroupConfig(name="inline", num_workers=workers)
    return InlineWorkerGroup(WorkerSpec(target, {}, **spec), config, sharding=sharding, device="cpu")


@pytest.fixture
def group():
    return start()


def test_arguments_are_not_copied(group):
    given = object()
    future = group.run_all_workers_single_data("echo", x=given)
    assert group.get_all_worker_results(future)[0][1]["x"] is given


def test_exceptions_are_raised_unchanged_and_the_group_stays_usable(group):
    with pytest.raises(RuntimeError, match=r"^bad thing on 0$") as caught:
        group.run_all_workers_single_data("fail", kind="Plain")
    assert type(caught.value).__name__ == "Plain"
    assert caught.value.__cause__ is None
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fail"
    assert group.get_all_worker_results(group.run_all_workers_single_data("sleep", seconds=0)) == [0]


def test_runs_in_the_calling_thread(group):
    before = threading.active_count()
    group.run_all_workers_single_data("who")
    assert threading.active_count() == before


def test_a_failing_cleanup_is_logged(group, caplog):
    assert group.shutdown("no_such_method") is False
    assert "the worker failed in no_such_method" in caplog.text


def test_one_worker_of_the_drivers_python():
    with pytest.raises(ConfigError, match=r"runs one worker, not 2.*worker_group\.name=processes or ray"):
        start(workers=2)
    with pytest.raises(ConfigError, match=r"needs its own Python.*worker_group\.name=ray"):
        start(py_executable="/other/python")


@pytest.mark.parametrize(
    ("target", "message"),
    [("probe_workers", "is not an import path"), ("probe_workers:Nothing", "module 'probe_workers' has no 'Nothing'")],
)
def test_bad_targets(target, message):
    with pytest.raises(PluginError, match=message):
        start(target)


@pytest.mark.slow
def test_needs_neither_ray_nor_torch():
    code = (
        "import sys, rlframework.workers.dispatch as i; "
        "print(*[m for m in ('ray', 'torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
