"""The proof that the suites work: every mutant fails the tests that it names, and a mutant names every test.

    class TestMutants(MutantProof):
        kind = "policy_worker"
        backend = "dtensor"

The sound part must pass a test before its mutants count. A mutant counts only if the test fails with a
`ConformanceFailure`, since an error in set-up proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from rlframework.plugins.types import Record
from rlframework_conformance import suite_of
from rlframework_conformance.layouts import Layout
from rlframework_conformance.measure import ConformanceFailure, MutantNotApplicable
from rlframework_conformance.mutants import Mutant, mutants_of
from rlframework_conformance.results import PassedTests
from rlframework_conformance.rules import Suite


def case_id(mutant: Mutant, test: str) -> str:
    """Return the pytest id of a mutant with one of the tests that it names."""
    return f"{mutant.name}-{test}"


class MutantProof:
    """A pytest class with one case per mutant and test; cases that need undeclared capabilities are omitted."""

    kind: ClassVar[str] = ""
    backend: ClassVar[str] = ""
    section: ClassVar[Mapping[str, Any]] = {}
    """The keys of the part's own section, as for the suite."""

    @classmethod
    def cases(cls, record: Record, device: str) -> list[tuple[Mutant, str]]:
        """Return each mutant with each of its tests, if `record` declares and `device` has what both need."""
        tests = suite_of(cls.kind).tests()
        return [
            (mutant, test)
            for mutant in mutants_of(cls.kind).values()
            for test in mutant.tests
            if mutant.applies(cls.section)
            and mutant.layout.capabilities | mutant.needs <= record.capabilities
            and (test not in tests or (tests[test].declared(record) and tests[test].fits(mutant.layout, device)))
        ]

    def test_every_test_is_named_by_a_mutant(self) -> None:
        """A test that no mutant fails proves nothing."""
        named = {test for mutant in mutants_of(self.kind).values() for test in mutant.tests}
        tests = suite_of(self.kind).tests().keys()
        assert not sorted(tests - named), "no mutant names these tests"
        assert not sorted(named - tests), "mutants name tests that do not exist"

    def test_mutant_is_caught(
        self,
        mutant_case: tuple[Mutant, str],
        open_proof_harness: Callable[..., Any],
        tests_passed_by_sound_part: PassedTests,
    ) -> None:
        """The sound part passes the test, and the mutant fails it with a `ConformanceFailure`.

        The case is skipped if the bug cannot occur in the part: it rejects the kind of model, or has nothing like the
        object that the mutant changes.
        """
        import pytest

        mutant, test = mutant_case
        suite = suite_of(self.kind)
        passed = tests_passed_by_sound_part.path(self.kind, self.backend, self.section, mutant.layout, test)
        if not passed.exists():
            sound = open_proof_harness(suite, mutant.layout, test, None)
            self._run(suite, test, sound)
            if sound.rejected:
                pytest.skip(f"{self.backend} rejects {', '.join(sound.rejected)}")
            passed.touch()
        try:
            self._run(suite, test, open_proof_harness(suite, mutant.layout, test, mutant))
        except ConformanceFailure:
            return
        except MutantNotApplicable as error:
            pytest.skip(f"the mutant {mutant.name} is left out: {error}")
        raise AssertionError(f"the mutant {mutant.name!r} passes {test}, which must detect it. Bug: {mutant.bug}")

    @staticmethod
    def _run(suite: type[Suite], test: str, harness: Any) -> None:
        try:
            getattr(suite(), test)(harness)
        finally:
            harness.close()


def open_harness(
    proof: type[MutantProof], record: Record, manager: Any, device: str, models: Path, folders: Callable[[str], Path]
) -> Callable[..., Any]:
    """Return `open(suite, layout, test, mutant)`, which opens a harness for the mutant, or for the sound part if None.

    `folders` creates a folder for a name.
    """

    def open_(suite: type[Suite], layout: Layout, test: str, mutant: Mutant | None) -> Any:
        own: Any = type(suite.__name__, (suite,), {"backend": proof.backend, "section": proof.section})
        harness = own.open_harness(
            record if mutant is None else mutant.break_record(record),
            layout,
            manager=manager,
            device=device,
            folder=folders(test[:40]),
            models=models,
            target=None if mutant is None or proof.kind == "policy_worker" else mutant.break_it(manager.load(record)),
            mutant=None if mutant is None else mutant.name,
        )
        harness.contract = suite.tests()[test].contract
        return harness

    return open_
