"""The lists of tests that `make test` leaves out: each is there, and each test of a backend runs with some backend."""

from __future__ import annotations

import re
from pathlib import Path

from left_out_cases import SAMPLED
from left_out_suites import SUITES

import rlframework_conformance as conformance
from rlframework.plugins.manager import create_manager
from rlframework_conformance.layouts import select_layouts

ROOT = Path(__file__).parents[1]
PROOF = ROOT / "plugins" / "conformance" / "rlframework_conformance" / "mutants" / "proof.py"


def class_of(name: str) -> re.Match[str]:
    """The class `file::name`: its suite, the backend, and the layouts that it names."""
    file, _, name = name.partition("::")
    pattern = rf'^class {name}\((\w+)\):\n(?:    """.*\n\n)?    backend = "([^"]+)"\n(?:    quick = \("(.*)",\))?'
    found = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{file} has no {name}"
    return found


def test_sampled_tests_are_there() -> None:
    for file, tests in SAMPLED.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        for test in tests:
            owner, _, name = test.rpartition("::")
            defined = PROOF.read_text(encoding="utf-8") if owner else text
            assert f"def {name}(" in defined, f"{file} has no {test}"
            assert f"class {owner}(" in text or not owner, f"{file} has no {owner}"


def test_tests_of_suites_are_there() -> None:
    for name, left_out in SUITES.items():
        suite = getattr(conformance, class_of(name)[1])
        assert left_out <= suite.tests().keys(), name


def test_each_test_of_a_backend_runs_with_some_backend() -> None:
    manager, suite = create_manager(), conformance.PolicyWorkerSuite
    expected, run = set[str](), set[str]()
    for name, left_out in SUITES.items():
        found = class_of(name)
        if found[1] == suite.__name__:
            record = manager.select(suite.kind, found[2]).record
            (layout,) = select_layouts(record, [found[3]])
            names = {*suite.expected(record, layout, "cpu")}
            expected |= names
            run |= names - left_out
    assert len(run) > 100
    assert expected - run == {  # further tests of the plugins cover the same
        "test_images_of_different_sizes_keep_to_their_rows",
        "test_rows_see_their_own_images",
        "test_training_goes_on_to_the_bit_from_native_files",
    }
