"""The pool of worker processes: which processes are reused, and which are ended."""

from __future__ import annotations

import os

import pytest

from rlframework.base.errors import WorkerError
from rlframework.config.sections import DeadlinesConfig, WorkerGroupConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework_conformance import policies

DATA = NamedSharding([0, 1], ["data_parallel"])
TENSOR = NamedSharding([0, 1], ["tensor_parallel"])


class Probe:
    """A worker that reports its process."""

    def __init__(self, *, context, word="hi"):
        self.word = word

    def where(self):
        return os.getpid(), self.word

    def fail(self):
        raise ValueError("on purpose")

    def shutdown(self):
        return


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    policies.end_idle()


def start(sharding=DATA, **kwargs):
    config = WorkerGroupConfig(name="processes", num_workers=2, deadlines=DeadlinesConfig(start=60.0, call=30.0))
    spec = WorkerSpec(f"{__name__}:Probe", kwargs)
    return policies.WarmWorkerGroup(spec, config, sharding=sharding, device="cpu")


def where(group):
    return group.get_all_worker_results(group.run_all_workers_single_data("where"))


def pids(group):
    return [pid for pid, _ in where(group)]


def running(found):
    return [pid for pid in found if os.path.exists(f"/proc/{pid}")]


@pytest.mark.slow
def test_processes_of_a_group_that_ended_in_peace_serve_the_next_with_a_new_worker():
    first = start(word="one")
    found = where(first)
    assert first.shutdown("shutdown")
    second = start(word="two")
    assert where(second) == [(pid, "two") for pid, _ in found]
    with pytest.raises(WorkerError, match="no longer usable"):
        where(first)
    assert second.shutdown("shutdown")


@pytest.mark.slow
def test_those_of_another_layout_are_ended():
    first = start()
    old = pids(first)
    first.shutdown("shutdown")
    second = start(TENSOR)
    assert not set(old) & set(pids(second))
    assert running(old) == []
    second.shutdown("shutdown")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["failed", "without its own end"])
def test_those_of_a_group_that_did_not_end_in_peace_are_ended(how):
    group = start()
    old = pids(group)
    if how == "failed":
        with pytest.raises((WorkerError, ValueError)):
            group.get_all_worker_results(group.run_all_workers_single_data("fail"))
        group.shutdown("shutdown")
    else:
        group.shutdown()
    assert running(old) == []


@pytest.mark.slow
def test_a_process_serves_a_limited_number_of_policies(monkeypatch):
    monkeypatch.setattr(policies, "_MAX_USES", 2)
    served = []
    for _ in range(3):
        group = start()
        served.append(pids(group))
        group.shutdown("shutdown")
    assert served[0] == served[1] != served[2]


@pytest.mark.slow
def test_end_idle_ends_them():
    group = start()
    old = pids(group)
    group.shutdown("shutdown")
    assert running(old) == old
    policies.end_idle()
    assert running(old) == []
