from __future__ import annotations

import subprocess
import sys
import threading
import traceback

import pytest

from rlframework.errors import ConfigError, PluginError
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers.inline import InlineWorkerGroup

ONE = NamedSharding([[0]], ["data_parallel", "tensor_parallel"])


@pytest.fixture
def group(probe_spec, group_config):
    return InlineWorkerGroup(probe_spec(word="hi"), group_config("inline", 1), sharding=ONE, device="cpu")


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


def test_a_failing_cleanup_is_logged(probe_spec, group_config, caplog):
    group = InlineWorkerGroup(probe_spec(), group_config("inline", 1), sharding=ONE, device="cpu")
    assert group.shutdown("no_such_method") is False
    assert "the worker failed in no_such_method" in caplog.text


def test_more_than_one_worker(probe_spec, group_config, line):
    with pytest.raises(ConfigError, match=r"runs one worker, not 2.*worker_group\.name=processes or ray"):
        InlineWorkerGroup(probe_spec(), group_config("inline", 2), sharding=line(2), device="cpu")


def test_a_worker_with_its_own_python(group_config):
    spec = WorkerSpec("probe_workers:Probe", {}, py_executable="/other/python")
    with pytest.raises(ConfigError, match=r"needs its own Python.*worker_group\.name=ray"):
        InlineWorkerGroup(spec, group_config("inline", 1), sharding=ONE, device="cpu")


@pytest.mark.parametrize(
    ("target", "message"),
    [("probe_workers", "is not an import path"), ("probe_workers:Nothing", "module 'probe_workers' has no 'Nothing'")],
)
def test_bad_targets(target, message, group_config):
    with pytest.raises(PluginError, match=message):
        InlineWorkerGroup(WorkerSpec(target, {}), group_config("inline", 1), sharding=ONE, device="cpu")


def test_needs_neither_ray_nor_torch():
    code = (
        "import sys, rlframework.workers.inline as i; "
        "print(*[m for m in ('ray', 'torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
