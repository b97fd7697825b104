"""The pytest plugin's layouts, and the report that it writes: each case runs pytest on a tiny suite."""

from __future__ import annotations

import json

import pytest
from probe_tiny_suite import run, verdict

pytestmark = pytest.mark.slow

pytest_plugins = "pytester"


@pytest.mark.parametrize(
    ("args", "layouts"),
    [
        ([], ["data=1", "data=2"]),
        (["--conformance-layout", "quick"], ["data=1", "data=2"]),
        (["--conformance-layout", "all"], ["data=1", "data=2", "tensor=2", "data=2,tensor=2"]),
        (["--conformance-layout", "data=4", "--conformance-layout", "tensor=2"], ["data=4", "tensor=2"]),
    ],
)
def test_a_suite_runs_once_a_layout(tests, pytester, args, layouts):
    tests.of("engine", "EngineSuite")
    pytester.makeconftest("")
    result = run(pytester, "-k", "not replicas", *args)
    assert [line.split()[2] for line in verdict(result)] == layouts


@pytest.mark.parametrize(
    ("args", "layouts"),
    [
        ([], ["tensor=2"]),
        (["--conformance-layout", "quick", "--conformance-layout", "data=2"], ["tensor=2", "data=2"]),
        (["--conformance-layout", "data=1"], ["data=1"]),
    ],
)
def test_a_class_may_say_what_quick_is(tests, pytester, args, layouts):
    tests.of("engine", "EngineSuite", more="quick = ('tensor=2',)")
    result = run(pytester, *args)
    assert result.ret == 0
    assert [line.split()[2] for line in verdict(result)] == layouts


@pytest.mark.parametrize(
    ("args", "layouts"),
    [
        ([], ["data=1", "data=2"]),
        (["--conformance-layout", "all"], ["tensor=2", "data=2"]),
        (["--conformance-layout", "data=1"], ["data=1"]),
    ],
)
def test_a_class_may_say_what_all_is(tests, pytester, args, layouts):
    tests.of("engine", "EngineSuite", more="every = ('tensor=2', 'data=2')")
    result = run(pytester, *args)
    assert result.ret == 0
    assert [line.split()[2] for line in verdict(result)] == layouts


def test_the_section_of_a_class_is_in_its_verdict(tests, pytester):
    tests.of(
        "engine", "EngineSuite", more="section = {'splitting': {'stage': 3}, 'name': 'x'}\n    quick = ('data=1',)"
    )
    (line,) = verdict(run(pytester))
    assert line.startswith("engine  EngineSuite  data=1 splitting.stage=3 name=x  CONFORMANT (cpu)")


def test_what_has_nothing_to_test_does_not_run_and_the_cpu_is_told(tests, pytester):
    tests.of("engine", "EngineSuite")
    result = run(pytester)
    assert result.ret == 0
    assert verdict(result) == [
        "engine  EngineSuite  data=1  CONFORMANT (cpu), untested: tensor_parallel  2 passed, 1 not declared",
        "engine  EngineSuite  data=2  CONFORMANT (cpu), untested: tensor_parallel  3 passed, 1 not declared",
    ]


@pytest.mark.parametrize(
    ("layout", "says"),
    [("pipeline=2", "*'engine' does not declare pipeline_parallel*"), ("tensr=2", "*'tensr=2' is not a layout*")],
)
def test_a_layout_that_cannot_be_is_an_error(tests, pytester, layout, says):
    tests.of("engine", "EngineSuite")
    result = run(pytester, "--conformance-layout", layout)
    assert result.ret == 2
    result.stdout.fnmatch_lines([says])


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [[], ["-n", "2"]], ids=["one process", "xdist"])
def test_the_report_holds_what_was_measured(tests, pytester, processes):
    tests("class TestA(TinySuite):\n    backend = 'wrong'\n\nclass TestB(TinySuite):\n    backend = 'known'\n")
    result = run(pytester, "--conformance-json", "out/report.json", *processes)
    assert result.ret == 1
    assert sorted(verdict(result)) == [
        "known  TinySuite  CONFORMANT except 1 known failure  1 passed, 1 known failure, 1 not declared",
        "wrong  TinySuite  NOT CONFORMANT                     1 passed, 1 failed, 1 not declared",
    ]
    report = json.loads((pytester.path / "out/report.json").read_text())
    assert report["format"] == 1
    assert {"cpu", "cores", "device", "python", "torch", "transformers"} <= report["machine"].keys()
    found = {found["backend"]: found for found in report["verdicts"]}["wrong"]
    assert (found["distribution"], found["version"], found["kind"]) == ("tiny", "1.5", "environment")
    assert found["counts"] == {"passed": 1, "known_failure": 0, "failed": 1, "error": 0}
    assert found["undeclared"] == ["test_it_has_adapters"]
    assert found["missing"] == []
    largest = found["contracts"]["2"]["largest"]
    assert (largest["quantity"], largest["error"], largest["tolerance"]) == ("the number", 0.5, 1e-5)
    assert (largest["got"], largest["expected"], largest["test"]) == (3.0, 2.0, "test_the_number_is_two")
    assert [test["outcome"] for test in found["tests"]] == ["passed", "failed"]
    assert "contract  2" in found["tests"][1]["message"]


def test_a_report_that_cannot_be_written_is_told_before_the_run(tests, pytester):
    tests.of("sound")
    (pytester.path / "file").write_text("")
    result = run(pytester, "--conformance-json", "file/report.json")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--conformance-json: *a component of the path is a file*"])


def test_with_xdist_what_did_not_run_is_known(tests, pytester):
    tests.of("sound")
    pytester.makeconftest("def pytest_collection_modifyitems(items):\n    items[:] = items[:0]\n")
    result = run(pytester, "-n", "2")
    assert verdict(result) == ["sound  TinySuite  INCOMPLETE (2 of 2 tests did not run)  0 passed, 1 not declared"]
