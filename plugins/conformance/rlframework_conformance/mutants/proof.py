"""The proof that the suites work: a test catches every mutant, and every test catches one.

    class TestMutants(MutantProof):
        kind = "policy_worker"
        backend = "dtensor"

The sound part must pass a test before its mutants count. A mutant counts only if the test fails with a
`ConformanceFailure`, since an error in set-up proves nothing. The pairs of mutants and tests are a minimal cover of the
kill matrix (`matrix`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from rlframework.plugins.types import Record
from rlframework_conformance import suite_of
from rlframework_conformance.layouts import Layout
from rlframework_conformance.measure import ConformanceFailure, MutantNotApplicable
from rlframework_conformance.mutants import Mutant, matrix, mutants_of
from rlframework_conformance.results import PassedTests
from rlframework_conformance.rules import Suite


def case_id(mutant: Mutant, test: str) -> str:
    """Return the pytest id of a mutant with one of the tests that catch it."""
    return f"{mutant.name}-{test}"


class MutantProof:
    """A pytest class with one case per mutant and test; cases that need undeclared capabilities are omitted."""

    kind: ClassVar[str] = ""
    backend: ClassVar[str] = ""
    section: ClassVar[Mapping[str, Any]] = {}
    """The keys of the part's own section, as for the suite."""
    only: ClassVar[Collection[str]] = ()
    """Tests to prove with every mutant that they catch, instead of a cover."""
    matrix: ClassVar[str] = ""
    """File for a kill matrix: then each mutant meets each test, except pairs that the file has."""

    @classmethod
    def cases(cls, record: Record, device: str) -> list[tuple[Mutant, str]]:
        """Return the pairs to prove, of those for which `record` declares and `device` has what both need."""
        mutants, tests = mutants_of(cls.kind), suite_of(cls.kind).tests()
        fit = {
            name: [
                test
                for test in (tests if cls.matrix else matrix.stored(cls.kind).get(name, ()))
                if test not in tests or (tests[test].declared(record) and tests[test].fits(mutant.layout, device))
            ]
            for name, mutant in mutants.items()
            if mutant.applies(cls.section) and mutant.layout.capabilities | mutant.needs <= record.capabilities
        }
        pairs = [(name, test) for name, tests_of_one in fit.items() for test in tests_of_one]
        if cls.matrix:
            noted = matrix.noted(Path(cls.matrix))
            pairs = [pair for pair in pairs if pair not in noted]
        elif cls.only:
            pairs = [(name, test) for name, test in pairs if test in cls.only]
        else:
            pairs = matrix.minimal_cover(fit)
        return [(mutants[name], test) for name, test in pairs]

    def test_the_kill_matrix_is_of_this_suite(self) -> None:
        """A mutant that no test catches is not detected; a test that catches no mutant proves nothing."""
        stored, mutants, tests = matrix.stored(self.kind), mutants_of(self.kind), suite_of(self.kind).tests()
        caught_by = {test for row in stored.values() for test in row}
        remedy = f": store rows of `rlframework conformance {self.backend} --kill-matrix FILE` in {matrix.STORED}"
        assert not [name for name in mutants if not stored.get(name)], "no test is stored for these mutants" + remedy
        assert not sorted(tests.keys() - caught_by), "no mutant is stored for these tests" + remedy
        assert not sorted(stored.keys() - mutants.keys()), "stored mutants do not exist" + remedy
        assert not sorted(caught_by - tests.keys()), "stored tests do not exist" + remedy

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
        try:
            caught = self._is_caught(mutant, test, open_proof_harness, tests_passed_by_sound_part)
        except MutantNotApplicable as error:
            self._note(mutant, test, str(error))
            pytest.skip(f"the mutant {mutant.name} is left out: {error}")
        self._note(mutant, test, "caught" if caught else "passed")
        if not (caught or self.matrix):
            raise AssertionError(f"the mutant {mutant.name!r} passes {test}, which must detect it. Bug: {mutant.bug}")

    def _note(self, mutant: Mutant, test: str, outcome: str) -> None:
        if self.matrix:
            matrix.note(Path(self.matrix), mutant.name, test, outcome)

    def _is_caught(self, mutant: Mutant, test: str, open_: Callable[..., Any], passed_tests: PassedTests) -> bool:
        """Run `test` on the sound part, unless it has passed, and on the mutant.

        Raises `MutantNotApplicable` also if the part rejects the kind of model, or another error than a failed
        requirement ends the test of a matrix: neither says anything about the test.
        """
        suite = suite_of(self.kind)
        passed = passed_tests.path(self.kind, self.backend, self.section, mutant.layout, test)
        if not passed.exists():
            sound = open_(suite, mutant.layout, test, None)
            self._run(suite, test, sound)
            if sound.rejected:
                raise MutantNotApplicable(f"{self.backend} rejects {', '.join(sound.rejected)}")
            passed.touch()
        try:
            self._run(suite, test, open_(suite, mutant.layout, test, mutant))
        except ConformanceFailure:
            return True
        except Exception as error:
            if not self.matrix or isinstance(error, MutantNotApplicable):
                raise
            raise MutantNotApplicable(f"the test ends with {type(error).__name__}: {error}") from error
        return False

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
