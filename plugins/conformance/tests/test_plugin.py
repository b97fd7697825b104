"""The pytest plugin reports everything that did not run; each case runs pytest on a tiny suite and tiny plugins."""

from __future__ import annotations

import json

import pytest
from probe_tiny_suite import run, verdict

pytestmark = pytest.mark.slow

pytest_plugins = "pytester"

LOADED = """
def pytest_terminal_summary(terminalreporter):
    import sys

    heavy = {"numpy", "omegaconf", "pydantic", "rlframework", "rlframework_conformance", "torch", "typer"}
    names = sorted(name for name in sys.modules if name.partition(".")[0] in heavy)
    terminalreporter.line(f"loaded: {', '.join(names)};")
"""


def test_a_sound_part_conforms(tests, pytester):
    tests.of("sound")
    result = run(pytester)
    assert result.ret == 0
    assert verdict(result) == ["sound  TinySuite  CONFORMANT  2 passed, 1 not declared"]
    result.assert_outcomes(passed=2)


FAILED = "NOT CONFORMANT  1 passed, 1 failed, 1 not declared"


@pytest.mark.parametrize(
    ("backend", "code", "words", "says"),
    [
        ("skipping", 1, FAILED, "*this one was skipped (not on Sundays)"),
        (
            "known",
            0,
            "CONFORMANT except 1 known failure  1 passed, 1 known failure, 1 not declared",
            "XFAIL *test_the_number_is_two* - known failure: three is nearly two",
        ),
        ("other", 1, FAILED, "*fails with ConformanceFailure (three is nearly two), but it failed with Runtime*"),
        ("fixed", 1, FAILED, "*but it passed. It is fixed: remove it from the record's known_failures"),
        (
            "absent",
            1,
            "NOT CONFORMANT  0 passed, 2 errors, 1 not declared",
            "*'absent' of tiny 1.5 is broken: module 'tiny_parts' has no 'Absent'*",
        ),
    ],
)
def test_skips_and_known_failures_and_classes_that_do_not_import(tests, pytester, backend, code, words, says):
    """A skip is a failure, also from within the test; a known failure must fail as it says."""
    tests.of(backend)
    result = run(pytester, "-rx")
    assert result.ret == code
    assert verdict(result) == [f"{backend}  TinySuite  {words}"]
    result.stdout.fnmatch_lines([says])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("backend = 'soudn'", "*there is no environment 'soudn'*Did you mean 'sound'?*"),
        ("backend = 'ruined'", "*the plugin 'ruined' of tiny 1.5 is broken: ImportError: libruin.so is missing*"),
        ("backend = 'mistaken'", "*known_failures of 'mistaken', of tiny 1.5, names test_of_no_suite*"),
        ("pass", "*test_it.TestIt must set `backend`*"),
    ],
)
def test_a_class_of_no_plugin_is_an_error(tests, pytester, body, says):
    tests(f"class TestIt(TinySuite):\n    {body}\n")
    result = run(pytester)
    assert result.ret == 2
    result.stdout.fnmatch_lines([says])


def test_a_wrong_number_is_reported_with_context_and_without_traceback(tests, pytester):
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


def test_what_is_not_implemented_is_summarized_instead_of_listed(tests, pytester):
    tests.of("unfinished")
    result = run(pytester, "-rf")
    assert result.ret == 1
    assert verdict(result) == ["unfinished  TinySuite  NOT CONFORMANT  1 passed, 1 failed, 1 not declared"]
    result.stdout.fnmatch_lines(
        [
            "not implemented yet, required by 1 test: number: return two",
            "  in        *tiny_parts.py:*, __get__",
            "*1 passed, 1 not implemented yet*",
        ]
    )
    result.stdout.no_fnmatch_line("FAILED*")


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
    result.stdout.fnmatch_lines([f"does not hold: every test of a conformance suite must run, but this one was {says}"])


@pytest.mark.parametrize(
    "args",
    [
        ["-k", "there"],
        ["-xk", "there"],
        ["-kthere"],
        ["--deselect", "test_it.py::TestIt::test_the_number_is_two"],
        ["--deselect=test_it.py::TestIt::test_the_number_is_two"],
        ["test_it.py::TestIt::test_it_is_there"],
    ],
)
def test_tests_that_the_command_line_leaves_out_make_the_verdict_incomplete(tests, pytester, args):
    """Chosen by hand, so that the run does not fail."""
    tests.of("sound")
    result = run(pytester, *args)
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


def test_a_conftest_that_deselects_tests_fails_the_run(tests, pytester):
    tests.of("sound")
    pytester.makeconftest("def pytest_collection_modifyitems(items):\n    del items[0]\n")
    result = run(pytester)
    assert result.ret == 1
    assert verdict(result) == ["sound  TinySuite  INCOMPLETE (1 of 2 tests did not run)  1 passed, 1 not declared"]


def test_a_conftest_that_deselects_a_whole_layout_first_fails_the_run(tests, pytester):
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
    """Each of them, with a conftest that deselects one test."""
    tests.of("sound")
    pytester.makeini(f"[pytest]\naddopts = {options}\n")
    pytester.makeconftest("def pytest_collection_modifyitems(items):\n    del items[-1]\n")
    result = run(pytester)
    assert result.ret in (1, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert "INCOMPLETE" in verdict(result)[0]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def test_it_is_there(self, harness): pass", "TestIt.test_it_is_there was changed: run the suite unmodified*"),
        ("test_it_is_there = None", "TestIt.test_it_is_there was changed: run the suite unmodified*"),
        ("__test__ = False", "TestIt sets __test__, so pytest would not run it*"),
        ("def __init__(self): pass", "TestIt sets __init__, so pytest would not run it*"),
        ("open_harness = None", "TestIt.open_harness was changed: run the suite unmodified*"),
    ],
)
def test_a_class_that_would_run_less_is_an_error(tests, pytester, body, says):
    tests.of("sound", more=body)
    result = run(pytester)
    assert result.ret == 2
    result.stdout.fnmatch_lines([says])


@pytest.mark.parametrize("name", ["test_it_is_there", "expected", "open_harness"])
def test_a_class_that_is_changed_after_it_was_made_is_an_error(tests, pytester, name):
    tests(f"class TestIt(TinySuite):\n    backend = 'sound'\n\nsetattr(TestIt, {name!r}, None)\n")
    result = run(pytester)
    assert result.ret == 2
    result.stdout.fnmatch_lines([f"TestIt.{name} was changed: run the suite unmodified*"])


@pytest.mark.parametrize(
    "trick",
    [
        "tiny_suite.Parts.test_it_is_there = None",
        "setattr(tiny_suite.Parts, 'test_it_is_there', tiny_suite.holds(1)(lambda self, harness: None))",
        "setattr(TinySuite, 'test_it_is_there', tiny_suite.holds(1)(lambda self, harness: None))",
        "delattr(tiny_suite.Parts, 'test_it_is_there')",
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
    result.stdout.fnmatch_lines(["TestIt.test_it_is_there was changed: run the suite unmodified*"])


def test_a_suite_that_is_changed_after_the_collection_is_an_error(tests, pytester):
    tests.of("sound")
    pytester.makeconftest(
        """
        def pytest_collection_finish(session):
            import tiny_suite
            setattr(tiny_suite.Parts, "test_the_number_is_two", lambda self, harness: None)
        """
    )
    result = run(pytester)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*TestIt.test_the_number_is_two was changed: run the suite unmodified*"])


@pytest.mark.parametrize("name", ["Conformance", "MyTests"])
def test_a_class_that_pytest_does_not_collect_is_an_error(tests, pytester, name):
    tests(f"class {name}(TinySuite):\n    backend = 'wrong'\n\ndef test_x():\n    pass\n")
    result = run(pytester)
    assert result.ret == 2
    result.stdout.fnmatch_lines([f"{name} runs a conformance suite*rename it to Test{name}*"])


@pytest.mark.parametrize("more", ["class TestIt(Base):\n    pass", "TestIt = Base"])
def test_the_base_of_a_collected_class_may_have_any_name(tests, pytester, more):
    tests(f"class Base(TinySuite):\n    backend = 'sound'\n\n{more}\n")
    assert run(pytester).ret == 0


def test_test_functions_of_another_name_are_an_error(tests, pytester):
    tests.of("sound")
    pytester.makeini("[pytest]\npython_functions = check_*\n")
    result = run(pytester)
    assert result.ret == 2
    result.stdout.fnmatch_lines(["TestIt: python_functions in the pytest configuration ignores*"])


def test_the_kit_costs_nothing_until_a_suite_is_imported(tests, pytester):
    """Without one, pytest imports only the plugin's options; a report to write is checked for its folder."""
    pytester.makepyfile(test_it="def test_mine():\n    pass\n", conftest=LOADED)
    core = (
        "rlframework",
        *(
            f"rlframework.base{module}"
            for module in ("", ".errors", ".files", ".lazy_names", ".moved", ".notebook_tracebacks")
        ),
    )
    kit = "rlframework_conformance, rlframework_conformance.pytest_plugin"
    for options, more in (
        ([], ""),
        (["-n", "1", "--conformance-layout", "all"], ""),
        (["--conformance-json", "report.json"], "".join(f"{module}, " for module in core)),
    ):
        result = pytester.runpytest_subprocess(*options)
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines([f"loaded: {more}{kit};"])
    assert not (pytester.path / "report.json").exists()


def test_a_suite_that_a_conftest_imported_is_noticed_at_the_first_name(tests, pytester):
    """Of a module whose first name is the class; the suite runs without any of its mutants."""
    pytester.makeconftest(f"from tiny_suite import TinySuite\n{LOADED}")
    pytester.makepyfile(test_it="class Conformance(__import__('tiny_suite').TinySuite):\n    backend = 'sound'\n")
    result = pytester.runpytest_subprocess()
    assert result.ret == 2
    result.stdout.fnmatch_lines(["Conformance runs a conformance suite*"])
    pytester.makepyfile(test_it="class TestIt(__import__('tiny_suite').TinySuite):\n    backend = 'sound'\n")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["loaded: *rlframework_conformance.session*;"])
    result.stdout.no_fnmatch_line("loaded: *rlframework_conformance.mutants*")


def test_a_fixture_of_the_name_of_ours_in_a_project_without_suites(tests, pytester):
    tests(
        "@pytest.fixture\ndef mutant_case():\n    return 1\n\n\ndef test_mine(mutant_case):\n    assert mutant_case\n"
    )
    run(pytester).assert_outcomes(passed=1)


def test_another_fixture_named_harness_is_an_error(tests, pytester):
    tests.of("sound")
    pytester.makeconftest("import pytest\n\n@pytest.fixture\ndef harness():\n    return None\n")
    result = run(pytester)
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*fixture `harness`, which hides that of the conformance suites*"])


def test_tests_of_one_s_own_run_beside_the_suite(tests, pytester):
    tests.of("sound", more="def test_mine(self, harness): harness.require(harness.load_class().number, 'mine')")
    result = run(pytester)
    assert result.ret == 0
    result.assert_outcomes(passed=3)
    assert verdict(result) == ["sound  TinySuite  CONFORMANT  2 passed, 1 not declared"]


def test_declared_but_untested_capabilities_are_reported(tests, pytester):
    """The suite's adapter test is made to pass; no test covers the plugin's own capability."""
    tests.of("boasting")
    (pytester.path / "tiny_suite.py").write_text(
        (pytester.path / "tiny_suite.py").read_text().replace('harness.require(False, "never run")', "pass")
    )
    result = run(pytester, "--conformance-json", "report.json")
    assert result.ret == 0
    assert verdict(result) == ["boasting  TinySuite  CONFORMANT, untested: tiny:scoring  3 passed"]
    assert json.loads((pytester.path / "report.json").read_text())["verdicts"][0]["untested"] == ["tiny:scoring"]
