"""Verdicts, the JSON report, and the page made from it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlframework.base.errors import DataError
from rlframework_conformance.markdown import main, markdown, markdown_of, read
from rlframework_conformance.report import (
    RESULT_JSON,
    Result,
    SuiteRun,
    Verdict,
    as_json,
    largest_errors,
    lines_of,
    proof_of,
    unwritten_of,
    verdicts_of,
    write_json,
)

RESULTS = Path(__file__).parents[3] / "docs" / "results"
SUBJECT = SuiteRun(
    suite="PolicyWorkerSuite",
    kind="policy_worker",
    backend="engine",
    distribution="tiny",
    version="1.5",
    layout="data=2,tensor=2",
    device="cuda",
    where="test_it.py::TestIt",
    capabilities=("data_parallel", "tensor_parallel"),
    expected=("test_a", "test_b"),
    undeclared=("test_c",),
)

NOT_CONFORMANT = (
    "| engine | 1.5 | data=2,tensor=2 | cuda | PolicyWorkerSuite | NOT CONFORMANT "
    "| 1 passed, 1 failed, 1 not declared |"
)


def measurement(error, tolerance, quantity="loss"):
    return {"quantity": quantity, "error": error, "tolerance": tolerance, "got": 1.0, "expected": 2.0, "place": ""}


def result(test, outcome="passed", suite_run=SUBJECT, contract=2, measurements=()):
    return Result(suite_run, test, contract, outcome, "", tuple(measurements), 0.5)


def verdict(*outcomes, **changes):
    suite_run = replace(SUBJECT, **changes)
    return Verdict(
        suite_run, [result(f"test_{name}", word, suite_run) for name, word in zip("ab", outcomes, strict=False)]
    )


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_mutants_are_counted_with_all_their_tests():
    """One is caught by one test and missed by another, one is left out, one is caught where a test is left out."""

    def report(case, when="call"):
        return SimpleNamespace(nodeid=f"test_it.py::TestProof::test_mutant_is_caught[{case}]", when=when)

    stats = {
        "": [report("half-test_a", "setup")],
        "passed": [report("half-test_a"), report("whole-test_a"), SimpleNamespace(nodeid="::test_other", when="call")],
        "failed": [report("half-test_b")],
        "skipped": [report("none-test_c"), report("whole-test_c")],
    }
    assert proof_of(stats) == "mutants: 1 of 3 caught, 1 not caught, 1 left out, for the reasons above"
    assert proof_of({"passed": []}) == ""


def test_missing_features_are_reported_once_with_the_number_of_tests():
    told = "NotImplementedError: step: one step\n  in        worker.py:4, step\n  repeat    rlframework"
    results = [replace(result(name, "failed"), message=told) for name in ("test_a", "test_b")]
    results.append(replace(result("test_d", "failed"), message='got "NotImplementedError: close: leave"\nwanted x'))
    lines = [
        "not implemented yet, required by 2 tests: step: one step\n  in        worker.py:4, step",
        "not implemented yet, required by 1 test: close: leave",
    ]
    assert unwritten_of([Verdict(SUBJECT, results)]) == lines
    assert unwritten_of([verdict("passed", "failed")]) == []


@pytest.mark.parametrize(
    ("outcomes", "changes", "word", "counts", "conformant"),
    [
        (("passed", "passed"), {}, "CONFORMANT", "2 passed, 1 not declared", True),
        (("passed", "passed"), {"undeclared": ()}, "CONFORMANT", "2 passed", True),
        (("passed", "passed"), {"device": "cpu"}, "CONFORMANT (cpu)", "2 passed, 1 not declared", True),
        (
            ("passed", "passed"),
            {"device": "cpu", "kind": "environment"},
            "CONFORMANT",
            "2 passed, 1 not declared",
            True,
        ),
        (
            ("passed", "known_failure"),
            {"device": "cpu"},
            "CONFORMANT (cpu) except 1 known failure",
            "1 passed, 1 known failure, 1 not declared",
            True,
        ),
        (
            ("known_failure", "known_failure"),
            {},
            "CONFORMANT except 2 known failures",
            "0 passed, 2 known failures, 1 not declared",
            True,
        ),
        (("passed",), {}, "INCOMPLETE (1 of 2 tests did not run)", "1 passed, 1 not declared", False),
        ((), {}, "INCOMPLETE (2 of 2 tests did not run)", "0 passed, 1 not declared", False),
        (("failed",), {}, "NOT CONFORMANT", "0 passed, 1 failed, 1 did not run, 1 not declared", False),
        (("failed", "error"), {}, "NOT CONFORMANT", "0 passed, 1 failed, 1 error, 1 not declared", False),
        (("error", "error"), {}, "NOT CONFORMANT", "0 passed, 2 errors, 1 not declared", False),
    ],
)
def test_the_word_and_the_counts(outcomes, changes, word, counts, conformant):
    found = verdict(*outcomes, **changes)
    assert (found.word, found.counts, found.conformant) == (word, counts, conformant)


def test_rejected_kinds_of_models_are_in_the_word_and_in_json_once():
    rejecting = replace(result("test_a"), rejected=("sinks", "windows"))
    (found,) = verdicts_of([rejecting, replace(result("test_b"), rejected=("windows",))])
    assert RESULT_JSON.validate_json(RESULT_JSON.dump_json(rejecting)) == rejecting
    assert found.word.startswith("CONFORMANT, rejects: sinks, windows")
    assert found.conformant
    (written,) = as_json([found])["verdicts"]
    assert written["rejected"] == ["sinks", "windows"]


# -- what is declared and not tested -----------------------------------------------------------------------------------


def passing(**changes):
    suite_run = replace(SUBJECT, **changes)
    return [result(test, suite_run=suite_run) for test in suite_run.expected]


def test_what_is_declared_and_not_tested_is_in_the_word_and_in_json():
    capabilities = {"capabilities": ("lora", "packing", "scoring", "tensor_parallel"), "tested": ("packing",)}
    (found,) = verdicts_of(passing(layout="data=1", device="cpu", **capabilities))
    assert found.word == "CONFORMANT (cpu), untested: lora, scoring, tensor_parallel"
    assert found.conformant
    (written,) = as_json([found])["verdicts"]
    assert list(written["untested"]) == ["lora", "scoring", "tensor_parallel"]
    assert written["verdict"] == found.word


def test_what_another_layout_of_the_run_tested_is_tested():
    both = {"capabilities": ("data_parallel", "lora")}
    one = passing(layout="data=1", **both)
    assert [found.untested for found in verdicts_of(one)] == [("data_parallel", "lora")]
    two = passing(layout="data=2", tested=("data_parallel",), **both)
    assert [found.untested for found in verdicts_of([*one, *two])] == [("lora",), ("lora",)]
    planned = [two[0].suite_run]
    assert [found.untested for found in verdicts_of(one, planned)][1] == ("data_parallel", "lora"), "it did not run"
    other = passing(layout="data=2", tested=("data_parallel",), kind="worker_group", **both)
    assert [found.untested for found in verdicts_of([*one, *other])] == [("data_parallel", "lora"), ("lora",)]


def test_known_failures_and_what_is_untested():
    found = replace(verdict("passed", "known_failure", device="cpu"), untested=("lora",))
    assert found.word == "CONFORMANT (cpu) except 1 known failure, untested: lora"
    assert replace(verdict("passed"), untested=("lora",)).word == "INCOMPLETE (1 of 2 tests did not run)"


def test_parts_of_one_name_have_a_column_each():
    engine, group = (replace(SUBJECT, kind=kind, capabilities=("data_parallel",)) for kind in ("policy_worker", "a_b"))
    report = as_json([Verdict(engine, (), ("data_parallel",)), Verdict(group), Verdict(engine, ())])
    page = markdown([report])
    assert "| capability | engine, policy worker | engine, a b |" in page
    assert "| data parallel | yes | yes |" in page, "a later verdict of the engine has tested it"
    assert "| lora | no | no |" in page


def test_lines_are_in_columns():
    verdicts = [verdict("passed", "passed"), verdict("passed", backend="a", layout="data=1")]
    assert lines_of(verdicts) == [
        "engine  PolicyWorkerSuite  data=2,tensor=2  CONFORMANT                             2 passed, 1 not declared",
        "a       PolicyWorkerSuite  data=1           INCOMPLETE (1 of 2 tests did not run)  1 passed, 1 not declared",
    ]


def test_a_column_without_anything_is_left_out():
    assert (
        verdict("passed", "passed", layout="").line()
        == "engine  PolicyWorkerSuite  CONFORMANT  2 passed, 1 not declared"
    )


def test_the_worst_that_a_test_had_counts_and_its_measurements_stay():
    """The call passed, the teardown failed."""
    passed = result("test_a", measurements=[measurement(1e-7, 1e-5)])
    (found,) = verdicts_of([passed, result("test_a", "error"), result("test_b"), result("test_b")])
    assert [(one.test, one.outcome) for one in found.results] == [("test_a", "error"), ("test_b", "passed")]
    assert found.results[0].measurements == passed.measurements


def test_each_suite_run_has_a_verdict_in_the_order_in_which_they_were_planned():
    other = replace(SUBJECT, layout="data=1")
    found = verdicts_of([result("test_b", suite_run=other), result("test_a", suite_run=other)], [SUBJECT, other])
    assert [one.suite_run.layout for one in found] == ["data=2,tensor=2", "data=1"]
    assert [one.test for one in found[1].results] == ["test_a", "test_b"]


def test_a_result_travels_as_text():
    sent = result("test_a", "failed", measurements=[measurement(1e-7, 1e-5)])
    assert RESULT_JSON.validate_json(RESULT_JSON.dump_json(sent)) == sent


# -- JSON --------------------------------------------------------------------------------------------------------------


def test_the_largest_error_and_that_nearest_to_its_tolerance():
    results = [
        result("test_a", measurements=[measurement(2e-6, 1e-5), measurement(1e-3, 3e-2, "bf16")]),
        result("test_b", measurements=[measurement(0.0, 0.0, "bits")]),
        result("test_c", contract=5, measurements=[measurement(0.0, 0.0, "bits")]),
    ]
    found = largest_errors(results)
    assert found.keys() == {"2", "5"}
    assert found["2"]["measurements"] == 3
    assert (found["2"]["largest"]["quantity"], found["2"]["largest"]["test"]) == ("bf16", "test_a")
    assert found["2"]["nearest_to_tolerance"]["quantity"] == "loss"
    assert found["2"]["nearest_to_tolerance"]["of_tolerance"] == pytest.approx(0.2)
    assert found["5"]["largest"]["of_tolerance"] == 0


@pytest.mark.parametrize("error", ["inf", 1e-9])
def test_an_error_where_none_is_allowed_or_without_bound_is_text_in_json(error, tmp_path):
    found = Verdict(SUBJECT, [result("test_a", "failed", measurements=[measurement(error, 0.0)])])
    write_json(tmp_path / "a" / "report.json", [found])
    text = (tmp_path / "a" / "report.json").read_text()
    report = json.loads(text, parse_constant=pytest.fail)
    largest = report["verdicts"][0]["contracts"]["2"]["largest"]
    assert float(largest["error"]) == (math.inf if error == "inf" else 1e-9)
    assert largest["of_tolerance"] == "inf"


def test_what_was_set_of_its_own_section_tells_verdicts_apart():
    stages = [replace(SUBJECT, section=f"zero_optimization.stage={stage}") for stage in (2, 3)]
    found = verdicts_of([result("test_a", suite_run=suite_run) for suite_run in stages])
    lines = lines_of(found)
    assert ["data=2,tensor=2 zero_optimization.stage=3" in line for line in lines] == [False, True]
    report = as_json(found)
    assert [verdict["section"] for verdict in report["verdicts"]] == [suite_run.section for suite_run in stages]
    page = markdown([report])
    assert page.count("| data=2,tensor=2 zero_optimization.stage=2 |") == 1
    for verdict in report["verdicts"]:
        del verdict["section"]  # as an older version wrote it
    assert markdown([report]).count("| data=2,tensor=2 |") == 2


# -- the tables --------------------------------------------------------------------------------------------------------


def test_the_page():
    plain = SuiteRun("EnvironmentSuite", "environment", "sums", "core", "0.1", "", "cpu", "x", (), ("test_a",), ())
    report = as_json(
        [
            Verdict(
                replace(SUBJECT, capabilities=(*SUBJECT.capabilities, "scoring")),
                [result("test_a", measurements=[measurement(2e-6, 1e-5)]), result("test_b", "failed")],
                ("scoring",),
            ),
            Verdict(plain, [result("test_a", suite_run=plain, contract=8)]),
        ]
    )
    report["date"] = "2030-01-02T03:04:05+00:00"
    report["machine"] = {"cpu": "a CPU", "cores": 2, "device": "cpu", "python": "3", "torch": "2", "transformers": "5"}
    page = markdown([report]).split("\n\n")
    assert page[:3] == [
        "# Conformance",
        "Run on 2030-01-02: a CPU, 2 cores; Python 3, torch 2, transformers 5.",
        "## Verdicts",
    ]
    assert page[3].split("\n") == [
        "| backend | version | layout | device | suite | verdict | tests |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        NOT_CONFORMANT,
        "| sums | 0.1 | - | cpu | EnvironmentSuite | CONFORMANT | 1 passed |",
    ]
    declared = page[5].split("\n")
    assert declared[:4] == [
        "| capability | engine, policy worker |",
        "| --- | --- |",
        "| tensor parallel | yes |",
        "| sequence parallel | no |",
    ]
    assert "| scoring | declared, untested |" in declared
    assert page[-1] == (
        "| backend | layout | device | measured | largest (allowed) | nearest to its limit (allowed) | which is |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| engine | data=2,tensor=2 | cuda | 1 | 2e-06 (1e-05) | 2e-06 (1e-05) | loss |\n"
    )
    assert page[-2].startswith("### 2: losses divide by global counts")


@pytest.mark.parametrize("text", ["", "[1]", '{"format": 99}', None])
def test_what_is_no_report_is_refused_by_name(text, tmp_path, capsys):
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=r"report\.json"):
        read(path)
    with pytest.raises(SystemExit, match=r"error: .*report\.json"):
        main([str(path), str(tmp_path / "page.md")])
    assert not (tmp_path / "page.md").exists()


def test_the_committed_page_is_made_from_the_committed_report():
    """`make conformance` writes both."""
    assert (RESULTS / "conformance.md").read_text() == markdown_of(sorted(RESULTS.glob("conformance*.json")))


@pytest.mark.slow
def test_a_shortened_report_gives_the_same_page(tmp_path):
    """The committed report is shortened: it omits single measurements."""
    whole = read(RESULTS / "conformance.json")
    for test in (test for verdict in whole["verdicts"] for test in verdict["tests"]):
        test["measurements"] = [{"error": 0.0}] * 3
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    main(["--shorten", str(tmp_path / "whole.json"), str(tmp_path / "short.json")])
    short = read(tmp_path / "short.json")
    assert {test["measurements"] for verdict in short["verdicts"] for test in verdict["tests"]} == {3}
    assert markdown_of([tmp_path / "short.json"]) == markdown_of([tmp_path / "whole.json"])
