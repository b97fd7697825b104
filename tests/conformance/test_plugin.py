"""The pytest plugin lets nothing pass in silence: each case runs pytest on a tiny suite and tiny parts."""

from __future__ import annotations

import json

import pytest

pytest_plugins = "pytester"

PARTS = """
    from rlframework.plugins.hookspec import hookimpl
    from rlframework.plugins.types import Capability, EnvironmentRecord, KnownFailure, PolicyWorkerRecord

    def record(name, target, known=(), kind=EnvironmentRecord, capabilities=()):
        return kind(name=name, target=f"tiny_parts:{target}", api_version=1,
                    capabilities=frozenset(capabilities), known_failures=tuple(known))

    KNOWN = KnownFailure("test_the_number_is_two", "ConformanceFailure", "three is nearly two")

    @hookimpl
    def rlframework_environments():
        return [
            record("sound", "Sound"),
            record("boasting", "Sound", capabilities=(Capability.LORA, Capability.SCORING)),
            record("wrong", "Wrong"),
            record("raising", "Raising"),
            record("skipping", "Skipping"),
            record("absent", "Absent"),
            record("known", "Wrong", [KNOWN]),
            record("other", "Raising", [KNOWN]),
            record("mended", "Sound", [KNOWN]),
            record("mistaken", "Sound", [KnownFailure("test_of_no_suite", "ValueError", "who knows")]),
        ]

    @hookimpl
    def rlframework_policy_workers():
        both = (Capability.DATA_PARALLEL, Capability.TENSOR_PARALLEL)
        return [record("engine", "Sound", kind=PolicyWorkerRecord, capabilities=both)]

    class Sound:
        number = 2.0

    class Wrong:
        number = 3.0

    class Property:
        def __init__(self, error):
            self.error = error
        def __get__(self, instance, owner):
            raise self.error

    class Raising:
        number = Property(RuntimeError("no number today"))

    import pytest

    class Skipping:
        number = Property(pytest.skip.Exception("not on Sundays"))
"""

SUITE = """
    from rlframework.conformance.bench import Bench
    from rlframework.conformance.rules import Suite, holds
    from rlframework.plugins.types import Capability

    class Parts(Suite):
        @classmethod
        def open_bench(cls, record, layout, *, manager, device, folder, models, target=None, mutant=None):
            return Bench(record, layout, manager, device, folder, models, target=target, mutant=mutant)

        @holds(1)
        def test_it_is_there(self, bench):
            bench.require(bench.part(), "there is a part")

        @holds(2)
        def test_the_number_is_two(self, bench):
            bench.scalar("the number", bench.part().number, 2.0)

        @holds(3, Capability.LORA)
        def test_it_has_adapters(self, bench):
            bench.require(False, "never run")

    class TinySuite(Parts, sealed=True):
        kind = "environment"

    class EngineSuite(Parts, sealed=True):
        kind = "policy_worker"
        layouts = True

        @holds(1, data_parallel=2)
        def test_replicas(self, bench):
            bench.equal("replicas", bench.layout.data, 2)

        @holds(1, gpu=True)
        def test_gpu(self, bench):
            bench.equal("device", bench.device, "cuda")
"""


@pytest.fixture(scope="session", autouse=True)
def _parts_are_imported():
    """Once, and not by each run of pytest anew: it forgets the modules that it imported."""
    from rlframework.conformance import report  # noqa: F401
    from rlframework.plugins.manager import create_manager

    create_manager()


@pytest.fixture
def tests(pytester, monkeypatch):
    """`tests("class TestIt(TinySuite): ...")` writes a test module beside an installed plugin and its suite."""
    monkeypatch.delenv("RLFRAMEWORK_DISABLE_PLUGINS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")
    info = pytester.mkdir("tiny-1.5.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[rlframework]\ntiny = tiny_parts\nruined = tiny_ruin\n")
    pytester.makepyfile(tiny_parts=PARTS, tiny_suite=SUITE, tiny_ruin="raise ImportError('libruin.so is missing')")
    pytester.syspathinsert()

    def write(body):
        pytester.makepyfile(test_it=f"import pytest\nfrom tiny_suite import EngineSuite, TinySuite\n\n{body}")

    def of(backend, suite="TinySuite", more="pass"):
        write(f"class TestIt({suite}):\n    backend = {backend!r}\n    {more}\n")

    write.of = of
    return write


def run(pytester, *args):
    quick = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:anyio")
    return pytester.runpytest_inprocess(*quick, *args)


def verdict(result):
    """The lines of the section of verdicts."""
    lines = result.outlines
    start = next(number for number, line in enumerate(lines) if line.strip("= ") == "conformance")
    return [line for line in lines[start + 1 :] if "Suite" in line and "::" not in line]


def test_a_sound_part_conforms(tests, pytester):
    tests.of("sound")
    result = run(pytester)
    assert result.ret == 0
    assert verdict(result) == ["sound  TinySuite  CONFORMANT  2 passed, 1 not declared"]
    result.assert_outcomes(passed=2)


def test_a_wrong_number_is_told_with_all_that_belongs_to_it_and_no_traceback(tests, pytester):
    tests.of("wrong")
    result = run(pytester)
    assert result.ret == 1
    assert verdict(result) == ["wrong  TinySuite  NOT CONFORMANT  1 passed, 1 failed, 1 not declared"]
    result.stdout.fnmatch_lines(
        [
            "the number is wrong",
            "  got       3  (wrong, data=1, cpu)",
            "  expected  2",
            "  error     0.5, allowed 1e-05",
            "  contract  2: losses divide by global counts*",
            "  repeat    rlframework conformance wrong --test test_the_number_is_two",
        ],
        consecutive=True,
    )
    result.stdout.no_fnmatch_line("*measure.py*")


def test_another_exception_keeps_its_traceback(tests, pytester):
    tests.of("raising")
    result = run(pytester)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["*tiny_parts.py:*RuntimeError", "*to repeat it*", "rlframework conformance raising --test test_the_number*"]
    )


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ("skip(reason='too slow')", "skipped (*too slow*"),
        ("skipif(True, reason='not here')", "skipped (*not here*"),
        ("xfail(reason='soon')", "marked xfail (soon)"),
    ],
)
@pytest.mark.parametrize("backend", ["sound", "wrong"])
def test_a_mark_that_skips_is_a_failure(tests, pytester, mark, says, backend):
    tests.of(backend, more=f"pytestmark = pytest.mark.{mark}")
    result = run(pytester)
    assert result.ret == 1
    assert verdict(result) == [f"{backend}  TinySuite  NOT CONFORMANT  0 passed, 2 failed, 1 not declared"]
    result.stdout.fnmatch_lines([f"does not hold: every test of a conformance suite runs, and this one was {says}"])


def test_a_skip_from_within_is_a_failure(tests, pytester):
    tests.of("skipping")
    result = run(pytester)
    assert result.ret == 1
    assert verdict(result) == ["skipping  TinySuite  NOT CONFORMANT  1 passed, 1 failed, 1 not declared"]
    result.stdout.fnmatch_lines(["*this one was skipped (not on Sundays)"])


@pytest.mark.parametrize(
    ("args", "code"),
    [(["-k", "there"], 0), (["--deselect", "test_it.py::TestIt::test_the_number_is_two"], 0)],
)
def test_a_deselected_test_makes_the_verdict_incomplete(tests, pytester, args, code):
    tests.of("sound")
    result = run(pytester, *args)
    assert result.ret == code
    assert verdict(result) == ["sound  TinySuite  INCOMPLETE (1 of 2 tests did not run)  1 passed, 1 not declared"]


def test_one_chosen_test_makes_the_verdict_incomplete(tests, pytester):
    tests.of("sound")
    result = run(pytester, "test_it.py::TestIt::test_it_is_there")
    assert result.ret == 0
    assert verdict(result) == ["sound  TinySuite  INCOMPLETE (1 of 2 tests did not run)  1 passed, 1 not declared"]


def test_nothing_chosen_is_incomplete_too(tests, pytester):
    tests.of("sound")
    result = run(pytester, "-k", "no_such_test")
    assert verdict(result) == ["sound  TinySuite  INCOMPLETE (2 of 2 tests did not run)  0 passed, 1 not declared"]


def test_the_first_failure_ends_the_run_and_the_rest_is_counted(tests, pytester):
    tests("class TestA(TinySuite):\n    backend = 'wrong'\n\nclass TestB(TinySuite):\n    backend = 'sound'\n")
    result = run(pytester, "-x")
    assert result.ret == 1
    assert verdict(result) == [
        "wrong  TinySuite  NOT CONFORMANT                         1 passed, 1 failed, 1 not declared",
        "sound  TinySuite  INCOMPLETE (2 of 2 tests did not run)  0 passed, 1 not declared",
    ]


def test_a_conftest_that_takes_tests_out_fails_the_run(tests, pytester):
    tests.of("sound")
    pytester.makeconftest("def pytest_collection_modifyitems(items):\n    del items[0]\n")
    result = run(pytester)
    assert result.ret == 1
    assert verdict(result) == ["sound  TinySuite  INCOMPLETE (1 of 2 tests did not run)  1 passed, 1 not declared"]


def test_a_conftest_that_takes_out_a_whole_layout_before_all_others_fails_the_run(tests, pytester):
    tests.of("engine", "EngineSuite")
    pytester.makeconftest(
        """
        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(items):
            items[:] = [item for item in items if "data=2" not in item.name]
        """
    )
    result = run(pytester)
    assert result.ret == 1
    assert [line.split()[2:4] for line in verdict(result)] == [["data=1", "CONFORMANT"], ["data=2", "INCOMPLETE"]]
    assert "INCOMPLETE (3 of 3 tests did not run)" in verdict(result)[1]


@pytest.mark.parametrize("options", ["-k there", "-m 'not slow'", "--deselect test_it.py::TestIt::test_it_is_there"])
def test_options_of_a_file_are_not_chosen_by_hand(tests, pytester, options):
    """Each of them, with a conftest that takes out one test."""
    tests.of("sound")
    pytester.makeini(f"[pytest]\naddopts = {options}\n")
    pytester.makeconftest("def pytest_collection_modifyitems(items):\n    del items[-1]\n")
    result = run(pytester)
    assert result.ret in (1, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert "INCOMPLETE" in verdict(result)[0]


@pytest.mark.parametrize("args", [["-xk", "there"], ["-kthere"], ["--deselect=test_it.py::TestIt::test_it_is_there"]])
def test_what_the_command_line_chooses_is_chosen_by_hand(tests, pytester, args):
    tests.of("sound")
    result = run(pytester, *args)
    assert result.ret == 0
    assert verdict(result) == ["sound  TinySuite  INCOMPLETE (1 of 2 tests did not run)  1 passed, 1 not declared"]


def test_an_unknown_backend_is_an_error(tests, pytester):
    tests.of("soudn")
    result = run(pytester)
    assert result.ret == 2
    result.stdout.fnmatch_lines(["*there is no environment 'soudn'*Did you mean 'sound'?*"])


def test_a_plugin_that_does_not_import_is_an_error(tests, pytester):
    tests.of("ruined")
    result = run(pytester)
    assert result.ret == 2
    result.stdout.fnmatch_lines(["*the plugin 'ruined' of tiny 1.5 is broken: ImportError: libruin.so is missing*"])


def test_a_class_that_does_not_import_is_an_error_of_each_test(tests, pytester):
    tests.of("absent")
    result = run(pytester)
    assert result.ret == 1
    assert verdict(result) == ["absent  TinySuite  NOT CONFORMANT  0 passed, 2 errors, 1 not declared"]
    result.stdout.fnmatch_lines(["*'absent' of tiny 1.5 is broken: AttributeError:*has no attribute 'Absent'*"])


def test_a_class_without_a_backend_is_an_error(tests, pytester):
    tests("class TestIt(TinySuite):\n    pass\n")
    result = run(pytester)
    assert result.ret == 2
    result.stdout.fnmatch_lines(["*test_it.TestIt must name its `backend`*"])


def test_a_known_failure_that_fails_as_it_says(tests, pytester):
    tests.of("known")
    result = run(pytester, "-rx")
    assert result.ret == 0
    assert verdict(result) == [
        "known  TinySuite  CONFORMANT except 1 known failure  1 passed, 1 known failure, 1 not declared"
    ]
    result.stdout.fnmatch_lines(["XFAIL *test_the_number_is_two* - known failure: three is nearly two"])


def test_a_known_failure_with_another_exception_is_a_failure(tests, pytester):
    tests.of("other")
    result = run(pytester)
    assert result.ret == 1
    assert verdict(result) == ["other  TinySuite  NOT CONFORMANT  1 passed, 1 failed, 1 not declared"]
    result.stdout.fnmatch_lines(["*fails with ConformanceFailure (three is nearly two), and it failed with Runtime*"])


def test_a_known_failure_that_passes_is_a_failure(tests, pytester):
    tests.of("mended")
    result = run(pytester)
    assert result.ret == 1
    assert verdict(result) == ["mended  TinySuite  NOT CONFORMANT  1 passed, 1 failed, 1 not declared"]
    result.stdout.fnmatch_lines(["*and it passed. It is mended: take it off the record's known_failures"])


def test_a_known_failure_of_no_test_is_an_error(tests, pytester):
    tests.of("mistaken")
    result = run(pytester)
    assert result.ret == 2
    result.stdout.fnmatch_lines(["*known_failures of 'mistaken', of tiny 1.5, names test_of_no_suite*"])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def test_it_is_there(self, bench): pass", "*overrides TinySuite.test_it_is_there*"),
        ("test_it_is_there = None", "*overrides TinySuite.test_it_is_there*"),
        ("__test__ = False", "TestIt sets __test__, so pytest would not run it*"),
        ("def __init__(self): pass", "TestIt sets __init__, so pytest would not run it*"),
        ("open_bench = None", "*overrides TinySuite.open_bench*"),
    ],
)
def test_a_class_that_would_run_less_is_an_error(tests, pytester, body, says):
    tests.of("sound", more=body)
    result = run(pytester)
    assert result.ret == 2
    result.stdout.fnmatch_lines([says])


@pytest.mark.parametrize("name", ["test_it_is_there", "expected", "open_bench"])
def test_a_class_that_is_changed_after_it_was_made_is_an_error(tests, pytester, name):
    tests(f"class TestIt(TinySuite):\n    backend = 'sound'\n\ntype.__setattr__(TestIt, {name!r}, None)\n")
    result = run(pytester)
    assert result.ret == 2
    result.stdout.fnmatch_lines([f"TestIt.{name} was changed: run the suite as it is"])


@pytest.mark.parametrize(
    "trick",
    [
        "tiny_suite.Parts.test_it_is_there = None",
        "type.__setattr__(tiny_suite.Parts, 'test_it_is_there', tiny_suite.holds(1)(lambda self, bench: None))",
        "type.__setattr__(TinySuite, 'test_it_is_there', tiny_suite.holds(1)(lambda self, bench: None))",
        "type.__delattr__(tiny_suite.Parts, 'test_it_is_there')",
    ],
    ids=["assigned", "set on a part", "set on the suite", "deleted"],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_suite_that_is_changed_behind_its_seal_is_an_error(tests, pytester, trick, when):
    mine = "class TestIt(TinySuite):\n    backend = 'sound'\n"
    lines = [f"import tiny_suite\n{trick}\n", mine]
    tests("\n".join(lines if when == "before" else lines[::-1]))
    result = run(pytester)
    assert result.ret == 2
    result.stdout.fnmatch_lines(["*test_it_is_there *cannot be replaced*" if " = " in trick else "TestIt.test_it_is_*"])


def test_a_suite_that_is_changed_after_the_collection_is_an_error(tests, pytester):
    tests.of("sound")
    pytester.makeconftest(
        """
        def pytest_collection_finish(session):
            import tiny_suite
            type.__setattr__(tiny_suite.Parts, "test_the_number_is_two", lambda self, bench: None)
        """
    )
    result = run(pytester)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*TestIt.test_the_number_is_two was changed: run the suite as it is"])


@pytest.mark.parametrize("name", ["Conformance", "MyTests"])
def test_a_class_that_pytest_does_not_look_at_is_an_error(tests, pytester, name):
    tests(f"class {name}(TinySuite):\n    backend = 'wrong'\n\ndef test_x():\n    pass\n")
    result = run(pytester)
    assert result.ret == 2
    result.stdout.fnmatch_lines([f"{name} runs a conformance suite*rename it, to Test{name}*"])


@pytest.mark.parametrize("more", ["class TestIt(Base):\n    pass", "TestIt = Base"])
def test_the_base_of_a_collected_class_may_have_any_name(tests, pytester, more):
    tests(f"class Base(TinySuite):\n    backend = 'sound'\n\n{more}\n")
    assert run(pytester).ret == 0


def test_test_functions_of_another_name_are_an_error(tests, pytester):
    tests.of("sound")
    pytester.makeini("[pytest]\npython_functions = check_*\n")
    result = run(pytester)
    assert result.ret == 2
    result.stdout.fnmatch_lines(["TestIt: python_functions in the pytest configuration passes over*"])


def test_a_fixture_of_the_name_of_ours_in_a_project_without_suites(tests, pytester):
    tests(
        "@pytest.fixture\ndef mutant_case():\n    return 1\n\n\ndef test_mine(mutant_case):\n    assert mutant_case\n"
    )
    run(pytester).assert_outcomes(passed=1)


def test_another_fixture_of_the_bench_s_name_is_an_error(tests, pytester):
    tests.of("sound")
    pytester.makeconftest("import pytest\n\n@pytest.fixture\ndef bench():\n    return None\n")
    result = run(pytester)
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*fixture `bench`, which hides that of the conformance suites*"])


def test_tests_of_one_s_own_run_beside_the_suite(tests, pytester):
    tests.of("sound", more="def test_mine(self, bench): bench.require(bench.part().number, 'mine')")
    result = run(pytester)
    assert result.ret == 0
    result.assert_outcomes(passed=3)
    assert verdict(result) == ["sound  TinySuite  CONFORMANT  2 passed, 1 not declared"]


def test_what_is_declared_and_no_test_looks_at_is_told(tests, pytester):
    """It has adapters of a kind, as the suite's test of them is mended here; of scoring there is none."""
    tests.of("boasting")
    (pytester.path / "tiny_suite.py").write_text(
        (pytester.path / "tiny_suite.py").read_text().replace('bench.require(False, "never run")', "pass")
    )
    result = run(pytester, "--conformance-json", "report.json")
    assert result.ret == 0
    assert verdict(result) == ["boasting  TinySuite  CONFORMANT, untested: scoring  3 passed"]
    assert json.loads((pytester.path / "report.json").read_text())["verdicts"][0]["untested"] == ["scoring"]


# -- layouts -----------------------------------------------------------------------------------------------------------


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
    [("pipeline=2", "*'engine' does not declare pipeline_parallel*"), ("tensr=2", "*'tensr=2' is no layout*")],
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
    result.stderr.fnmatch_lines(["*--conformance-json: *a part of the path is a file*"])


def test_with_xdist_what_did_not_run_is_known(tests, pytester):
    tests.of("sound")
    pytester.makeconftest("def pytest_collection_modifyitems(items):\n    items[:] = items[:0]\n")
    result = run(pytester, "-n", "2")
    assert verdict(result) == ["sound  TinySuite  INCOMPLETE (2 of 2 tests did not run)  0 passed, 1 not declared"]
