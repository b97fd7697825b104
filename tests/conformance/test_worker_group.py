"""Core's worker groups pass the suite, and the suite catches every broken one."""

from __future__ import annotations

import pytest

from rlframework.conformance import WorkerGroupSuite
from rlframework.conformance.measure import ConformanceFailure
from rlframework.conformance.mutants import mutants_of
from rlframework.plugins.manager import create_manager

MUTANTS = mutants_of("worker_group")


class TestInline(WorkerGroupSuite):
    backend = "inline"


class TestProcesses(WorkerGroupSuite):
    backend = "processes"


@pytest.mark.usefixtures("ray_session")
class TestRay(WorkerGroupSuite):
    backend = "ray"
    pytestmark = pytest.mark.xdist_group("ray")


def run(test, mutant, folder):
    """One test of the suite on a mutant of `processes`."""
    manager = create_manager()
    record = manager.select("worker_group", "processes").record
    bench = WorkerGroupSuite.open_bench(
        record,
        mutant.layout,
        manager=manager,
        device="cpu",
        folder=folder,
        models=folder,
        target=mutant.break_it(manager.load(record)),
        mutant=mutant.name,
    )
    try:
        getattr(WorkerGroupSuite(), test)(bench)
    finally:
        bench.close()


@pytest.mark.parametrize(("name", "test"), [(name, test) for name, mutant in MUTANTS.items() for test in mutant.tests])
def test_the_suite_catches(name, test, tmp_path):
    mutant = MUTANTS[name]
    assert WorkerGroupSuite.tests()[test].data_parallel <= mutant.layout.data
    with pytest.raises(ConformanceFailure):
        run(test, mutant, tmp_path)


def test_every_test_has_a_mutant():
    named = {test for mutant in MUTANTS.values() for test in mutant.tests}
    assert named == set(WorkerGroupSuite.tests())
