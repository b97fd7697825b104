"""The proof of the suites: every mutant is caught by the tests that it names, and every test is named by a mutant.

    class TestMutants(MutantProof):
        kind = "policy_worker"
        backend = "dtensor"

The sound part passes a test before its mutants count, and a mutant counts only where the test fails with a
`ConformanceFailure`: an error in set-up proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from rlframework.conformance import suite_of
from rlframework.conformance.layouts import Layout
from rlframework.conformance.measure import ConformanceFailure
from rlframework.conformance.mutants import Mutant, mutants_of
from rlframework.conformance.passed_tests import Passes
from rlframework.conformance.rules import Suite
from rlframework.plugins.types import Record


def case_id(mutant: Mutant, test: str) -> str:
    """How pytest calls a mutant with one of the tests that it names."""
    return f"{mutant.name}-{test}"


class MutantProof:
    """Collected by pytest once a mutant and test; what is not declared by the part proves nothing and is left out."""

    kind: ClassVar[str] = ""
    backend: ClassVar[str] = ""
    section: ClassVar[Mapping[str, Any]] = {}
    """Keys of the part's own section, as for the suite."""

    @classmethod
    def cases(cls, record: Record, device: str) -> list[tuple[Mutant, str]]:
        """Each mutant with each test that it names, where the part declares and `device` has what both need."""
        tests = suite_of(cls.kind).tests()
        return [
            (mutant, test)
            for mutant in mutants_of(cls.kind).values()
            for test in mutant.tests
            if mutant.applies(cls.section)
            and mutant.layout.capabilities <= record.capabilities
            and (test not in tests or (tests[test].declared(record) and tests[test].fits(mutant.layout, device)))
        ]

    def test_every_test_is_named_by_a_mutant(self) -> None:
        """A test that no bug fails is no test."""
        named = {test for mutant in mutants_of(self.kind).values() for test in mutant.tests}
        tests = suite_of(self.kind).tests().keys()
        assert not sorted(tests - named), "no mutant names these tests"
        assert not sorted(named - tests), "mutants name tests that are not there"

    def test_mutant_is_caught(
        self, mutant_case: tuple[Mutant, str], open_proof_bench: Callable[..., Any], sound_passes: Passes
    ) -> None:
        """The sound part passes; the mutant fails, by numbers or by what is required."""
        mutant, test = mutant_case
        suite = suite_of(self.kind)
        passed = sound_passes.path(self.kind, self.backend, self.section, mutant.layout, test)
        if not passed.exists():
            self._run(suite, test, open_proof_bench(suite, mutant.layout, test, None))
            passed.touch()
        try:
            self._run(suite, test, open_proof_bench(suite, mutant.layout, test, mutant))
        except ConformanceFailure:
            return
        raise AssertionError(f"the mutant {mutant.name!r} ({mutant.bug}) survives {test}")

    @staticmethod
    def _run(suite: type[Suite], test: str, bench: Any) -> None:
        try:
            getattr(suite(), test)(bench)
        finally:
            bench.close()


def open_bench(
    proof: type[MutantProof], record: Record, manager: Any, device: str, models: Path, folders: Callable[[str], Path]
) -> Callable[..., Any]:
    """`open(suite, layout, test, mutant)`: a bench with the sound part, or with the mutant; `folders` makes folders."""

    def open_(suite: type[Suite], layout: Layout, test: str, mutant: Mutant | None) -> Any:
        own: Any = type(suite.__name__, (suite,), {"backend": proof.backend, "section": proof.section})
        bench = own.open_bench(
            record if mutant is None else mutant.break_record(record),
            layout,
            manager=manager,
            device=device,
            folder=folders(test[:40]),
            models=models,
            target=None if mutant is None or proof.kind == "policy_worker" else mutant.break_it(manager.load(record)),
            mutant=None if mutant is None else mutant.name,
        )
        bench.contract = suite.tests()[test].contract
        return bench

    return open_
