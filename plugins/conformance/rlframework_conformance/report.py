"""Verdicts of a suite run, as a line per backend, suite and layout, and as JSON.

A test's result travels in the user properties of its report, so that verdicts are the same with pytest-xdist. `results`
creates results and `markdown` renders the JSON. Imports no torch and no pytest.
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from rlframework.base.files import write_atomically
from rlframework.observers.host import cpu_name, package_version
from rlframework.workers.machine import cpu_count
from rlframework_conformance.contracts import CONTRACTS
from rlframework_conformance.measure import NOT_WRITTEN
from rlframework_conformance.sections import section_words

if TYPE_CHECKING:
    from rlframework.plugins.manager import Registered
    from rlframework_conformance.layouts import Layout
    from rlframework_conformance.rules import Suite

FORMAT = 1
"""Version of the JSON format."""
PROPERTY = "rlframework_conformance"
"""Name of the user property of a test report that holds its `Result` as JSON."""
OF_DEVICES = ("policy_worker", "generation_engine")
"""Kinds with tests that need a GPU; a verdict from a run on the CPU says so."""

_MUTANT_CASE = re.compile(r"::test_mutant_is_caught\[(.+)-test_")
"""The name of the mutant in the id of a test of `MutantProof`."""

Outcome = Literal["passed", "failed", "known_failure", "error"]
_WORST: tuple[Outcome, ...] = ("passed", "known_failure", "failed", "error")
_WORDS = {"passed": "passed", "failed": "failed", "error": "error", "known_failure": "known failure"}


@dataclass(frozen=True)
class SuiteRun:
    """One suite run on one plugin in one layout, the basis of a verdict.

    `where` is the test class. `expected` are the tests that must pass, `tested` those `capabilities` that a test needs
    or the layout uses. `section` has the keys of the plugin's own section as words, for suites that run in layouts;
    other plugins receive only what they need to run at all, such as paths.
    """

    suite: str
    kind: str
    backend: str
    distribution: str
    version: str
    layout: str
    device: str
    where: str
    capabilities: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    undeclared: tuple[str, ...] = ()
    tested: tuple[str, ...] = ()
    section: str = ""

    @property
    def layout_and_section(self) -> str:
        """Layout and section: `data=2 zero_optimization.stage=3`."""
        return f"{self.layout} {self.section}".strip()

    @classmethod
    def of(cls, suite: type[Suite], registered: Registered, layout: Layout, device: str, where: str) -> SuiteRun:
        """Describe a run of `suite`, the class that sets `backend`, located at `where`."""
        record = registered.record
        return cls(
            suite=next(base.__name__ for base in suite.__mro__ if base.__dict__.get("_sealed")),
            kind=suite.kind,
            backend=record.name,
            distribution=registered.distribution,
            version=registered.version,
            layout=str(layout) if suite.layouts else "",
            device=device,
            where=where,
            capabilities=tuple(sorted(str(capability) for capability in record.capabilities)),
            expected=tuple(suite.expected(record, layout, device)),
            undeclared=tuple(suite.undeclared(record)),
            tested=tuple(sorted(map(str, suite.uses(record, layout, device)))),
            section=" ".join(section_words(suite.section)) if suite.layouts else "",
        )


@dataclass(frozen=True)
class Result:
    """The result of one test.

    `message` is the reason of a failure, `measurements` are `measure.Measurement` as mappings, and `rejected` names the
    kinds of models that were rejected, as they may be.
    """

    suite_run: SuiteRun
    test: str
    contract: int
    outcome: Outcome
    message: str = ""
    measurements: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0
    rejected: tuple[str, ...] = ()


SUITE_RUN_JSON = TypeAdapter(SuiteRun)
RESULT_JSON = TypeAdapter(Result)
"""Convert to JSON text and back, for the user properties of a report and between the processes of pytest-xdist."""


# -- results -----------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not support, by text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def results_in(stats: Mapping[str, Sequence[Any]]) -> list[Result]:
    """Return the results in the reports of a terminal reporter's `stats`."""
    return [
        RESULT_JSON.validate_json(value)
        for reports in stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == PROPERTY
    ]


# -- verdicts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The verdict on all results of one suite run, with the worst result of each test.

    `untested`: declared capabilities that no test of the whole session covered, in any layout.
    """

    suite_run: SuiteRun
    results: Sequence[Result] = field(default_factory=tuple)
    untested: Sequence[str] = ()

    @property
    def missing(self) -> list[str]:
        """Expected tests without a result."""
        ran = {result.test for result in self.results}
        return [test for test in self.suite_run.expected if test not in ran]

    def count(self, outcome: Outcome) -> int:
        """Return the number of tests with this outcome."""
        return sum(result.outcome == outcome for result in self.results)

    @property
    def conformant(self) -> bool:
        """Whether every test ran and passed, or failed as the record says."""
        return not (self.missing or self.count("failed") or self.count("error"))

    @property
    def rejected(self) -> list[str]:
        """The kinds of models that were rejected, which is not a failure."""
        return list(dict.fromkeys(kind for result in self.results for kind in result.rejected))

    @property
    def word(self) -> str:
        """The verdict as text."""
        if self.count("failed") or self.count("error"):
            return "NOT CONFORMANT"
        if self.missing:
            return f"INCOMPLETE ({len(self.missing)} of {_tests(len(self.suite_run.expected))} did not run)"
        on_cpu = " (cpu)" if self.suite_run.kind in OF_DEVICES and self.suite_run.device == "cpu" else ""
        known = self.count("known_failure")
        failures = f" except {known} known failure{'s' * (known != 1)}" if known else ""
        remarks = {"rejects": self.rejected, "untested": self.untested}
        named = [f", {remark}: {', '.join(names)}" for remark, names in remarks.items() if names]
        return f"CONFORMANT{on_cpu}{failures}{''.join(named)}"

    @property
    def counts(self) -> str:
        """Counts such as `41 passed, 3 not declared`."""
        parts = [f"{self.count('passed')} passed"]
        others: tuple[Outcome, ...] = ("failed", "error", "known_failure")
        parts += [_counted(self.count(outcome), outcome) for outcome in others if self.count(outcome)]
        if self.missing and not self.word.startswith("INCOMPLETE"):
            parts.append(f"{len(self.missing)} did not run")
        if self.suite_run.undeclared:
            parts.append(f"{len(self.suite_run.undeclared)} not declared")
        return ", ".join(parts)

    def columns(self) -> tuple[str, ...]:
        """Return the cells of its line."""
        return self.suite_run.backend, self.suite_run.suite, self.suite_run.layout_and_section, self.word, self.counts

    def line(self, widths: Sequence[int] = ()) -> str:
        """Return a line of backend, suite, layout, verdict and counts, padded to `widths`."""
        cells = [cell.ljust(width) for cell, width in zip(self.columns(), widths or [0] * 5, strict=True)]
        return "  ".join(cell for cell, width in zip(cells, widths or [1] * 5, strict=True) if width and cell).rstrip()


def _counted(count: int, outcome: Outcome) -> str:
    return f"{count} {_WORDS[outcome]}{'s' * (count != 1 and outcome != 'failed')}"


def _tests(count: int) -> str:
    return f"{count} test{'s' * (count != 1)}"


def lines_of(verdicts: Sequence[Verdict]) -> list[str]:
    """Return an aligned line for each verdict."""
    widths = [
        max((len(cell) for cell in column), default=0) for column in zip(*(v.columns() for v in verdicts), strict=True)
    ]
    return [verdict.line(widths) for verdict in verdicts]


def unwritten_of(verdicts: Iterable[Verdict]) -> list[str]:
    """Summarize the texts of `NotImplementedError`: the number of tests that raised each, and where it is raised."""
    texts = (result.message for verdict in verdicts for result in verdict.results)
    found = Counter((match[1].rstrip('"'), match[2] or "") for text in texts if (match := NOT_WRITTEN.search(text)))
    return [
        f"not implemented yet, required by {_tests(count)}: {text}{place}"
        for (text, place), count in found.most_common()
    ]


def proof_of(stats: Mapping[str, Sequence[Any]]) -> str:
    """Count the mutants in the reports of a terminal reporter's `stats`; empty if there are none."""
    found: dict[str, set[str]] = {}
    for outcome in ("passed", "skipped", "failed", "error"):
        for report in stats.get(outcome, ()):
            case = _MUTANT_CASE.search(report.nodeid)
            if case and (report.when == "call" or outcome != "passed"):
                found.setdefault(case[1], set()).add(outcome)
    missed = sum(bool(outcomes & {"failed", "error"}) for outcomes in found.values())
    left_out = sum(outcomes == {"skipped"} for outcomes in found.values())
    text = f"mutants: {len(found) - missed - left_out} of {len(found)} caught"
    parts = {"not caught": missed, "left out, for the reasons above": left_out}
    return ", ".join([text, *(f"{count} {word}" for word, count in parts.items() if count)]) if found else ""


def verdicts_of(results: Iterable[Result], planned: Iterable[SuiteRun] = ()) -> list[Verdict]:
    """Return one verdict per suite run in order of appearance; `planned` are those that should have results."""
    found: dict[SuiteRun, dict[str, Result]] = {suite_run: {} for suite_run in planned}
    for result in results:
        tests = found.setdefault(result.suite_run, {})
        before = tests.get(result.test)
        if before is None or _WORST.index(result.outcome) > _WORST.index(before.outcome):
            before_measurements = before.measurements if before is not None else ()
            tests[result.test] = replace(result, measurements=result.measurements or before_measurements)
    tested = _tested(suite_run for suite_run, tests in found.items() if tests)
    return [
        Verdict(
            suite_run,
            sorted(tests.values(), key=lambda result: _place(suite_run, result)),
            tuple(name for name in suite_run.capabilities if name not in tested.get(_part(suite_run), ())),
        )
        for suite_run, tests in found.items()
    ]


def _tested(ran: Iterable[SuiteRun]) -> dict[tuple[str, ...], set[str]]:
    """Return the capabilities tested in any layout, by plugin."""
    tested: dict[tuple[str, ...], set[str]] = {}
    for suite_run in ran:
        tested.setdefault(_part(suite_run), set()).update(suite_run.tested)
    return tested


def _part(suite_run: SuiteRun) -> tuple[str, ...]:
    return suite_run.kind, suite_run.backend, suite_run.distribution, suite_run.version


def _place(suite_run: SuiteRun, result: Result) -> int:
    return suite_run.expected.index(result.test) if result.test in suite_run.expected else len(suite_run.expected)


# -- JSON --------------------------------------------------------------------------------------------------------------


def write_json(path: str | Path, verdicts: Sequence[Verdict]) -> None:
    """Write verdicts and all measurements to `path` atomically."""
    write_atomically(path, json.dumps(as_json(verdicts), indent=1, allow_nan=False) + "\n")


def as_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the contents of the JSON report."""
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(any(verdict.suite_run.device == "cuda" for verdict in verdicts)),
        "verdicts": [_verdict_json(verdict) for verdict in verdicts],
    }


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    suite_run = asdict(verdict.suite_run)
    del suite_run["expected"], suite_run["where"], suite_run["tested"]
    return {
        **suite_run,
        "verdict": verdict.word,
        "conformant": verdict.conformant,
        "counts": {outcome: verdict.count(outcome) for outcome in _WORST},
        "missing": verdict.missing,
        "rejected": verdict.rejected,
        "untested": verdict.untested,
        "seconds": round(sum(result.seconds for result in verdict.results), 1),
        "contracts": largest_errors(verdict.results),
        "tests": [
            {key: value for key, value in asdict(result).items() if key != "suite_run"} for result in verdict.results
        ],
    }


def largest_errors(results: Iterable[Result]) -> dict[str, dict[str, Any]]:
    """For each contract, return the number of measurements, the largest error, and the one nearest to its tolerance."""
    of: dict[int, list[dict[str, Any]]] = {}
    for result in results:
        of.setdefault(result.contract, []).extend(
            {"test": result.test, **measurement, "of_tolerance": share(measurement)}
            for measurement in result.measurements
        )
    return {
        str(contract): {
            "measurements": len(of[contract]),
            "largest": plain(max(of[contract], key=lambda found: float(found["error"]))),
            "nearest_to_tolerance": plain(max(of[contract], key=lambda found: float(found["of_tolerance"]))),
        }
        for contract in CONTRACTS
        if of.get(contract)
    }


def share(measurement: Mapping[str, Any]) -> float:
    """Return the error as a fraction of its tolerance; above 1 it fails."""
    error, tolerance = float(measurement["error"]), float(measurement["tolerance"])
    if error == 0:
        return 0.0
    return error / tolerance if tolerance > 0 else math.inf


def machine(gpu: bool) -> dict[str, Any]:
    """Describe this machine; torch is asked for the GPU's name only if one was used."""
    device = "cpu"
    if gpu:
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU found by torch"
    return {
        "cpu": cpu_name(),
        "cores": cpu_count(),
        "device": device,
        "python": platform.python_version(),
        **{name: package_version(name) for name in ("torch", "transformers")},
    }
