"""Verdicts: what a run of the suites found, as a line for each backend, suite and layout, and as JSON.

A test's result travels in its report's user properties, so that verdicts are the same with pytest-xdist. What a result
is, `judging` decides; tables of the JSON are made by `table`. Imports no torch and no pytest.
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

from rlframework.conformance.contracts import CONTRACTS
from rlframework.conformance.sections import section_words
from rlframework.files import write_atomically
from rlframework.observers.host import cpu_name, package_version
from rlframework.workers.machine import cpu_count

if TYPE_CHECKING:
    from rlframework.conformance.layouts import Layout
    from rlframework.conformance.rules import Suite
    from rlframework.plugins.manager import Registered

FORMAT = 1
"""Version of the JSON's form."""
PROPERTY = "rlframework_conformance"
"""Name of the user property of a test's report that holds its `Result` as JSON."""
OF_DEVICES = ("policy_worker", "generation_engine")
"""Kinds with tests that need a GPU: run on the CPU alone, they conform there, and the verdict says so."""

Outcome = Literal["passed", "failed", "known_failure", "error"]
_WORST: tuple[Outcome, ...] = ("passed", "known_failure", "failed", "error")
_WORDS = {"passed": "passed", "failed": "failed", "error": "error", "known_failure": "known failure"}


@dataclass(frozen=True)
class Subject:
    """What one verdict is about: a part, as the class `where` tests it, in a layout, and what it must pass.

    `section`: the keys of its own section that it is run with, as words, where it is run in layouts (other parts are
    given what they need to run at all, such as paths). `tested` are those of its `capabilities` that a test needs, or
    the layout itself uses.
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
    def how(self) -> str:
        """Layout and section: `data=2 zero_optimization.stage=3`."""
        return f"{self.layout} {self.section}".strip()

    @classmethod
    def of(cls, suite: type[Suite], registered: Registered, layout: Layout, device: str, where: str) -> Subject:
        """`suite` is the class that names the backend, `where` its place in the tests."""
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

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Subject:
        """From the mapping that `to_json` writes."""
        plain: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        return cls(**plain)

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Result:
    """What became of one test: `message` is why it failed, each measurement a `measure.Measurement` as a mapping."""

    subject: Subject
    test: str
    contract: int
    outcome: Outcome
    message: str = ""
    measurements: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0

    def to_json(self) -> str:
        """As text, for a report's user properties."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Result:
        """What `to_json` wrote."""
        values = json.loads(text)
        values["subject"] = Subject.from_json(values["subject"])
        return cls(**{**values, "measurements": tuple(values["measurements"])})


# -- results -----------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """JSON has no infinity and no NaN: wherever they are in `value`, they become text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def results_in(stats: Mapping[str, Sequence[Any]]) -> list[Result]:
    """The results in the reports of a terminal reporter's `stats`."""
    return [
        Result.from_json(value)
        for reports in stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == PROPERTY
    ]


# -- verdicts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What all results of one subject come to; one result for each test, the worst that there was.

    `untested`: capabilities that the part declares and that nothing in the whole run looked at, in no layout.
    """

    subject: Subject
    results: Sequence[Result] = field(default_factory=tuple)
    untested: Sequence[str] = ()

    @property
    def missing(self) -> list[str]:
        """Expected tests without a result."""
        ran = {result.test for result in self.results}
        return [test for test in self.subject.expected if test not in ran]

    def count(self, outcome: Outcome) -> int:
        """How many tests came out so."""
        return sum(result.outcome == outcome for result in self.results)

    @property
    def conformant(self) -> bool:
        """Whether every test ran, and passed or failed as the record says."""
        return not (self.missing or self.count("failed") or self.count("error"))

    @property
    def word(self) -> str:
        """The verdict."""
        if self.count("failed") or self.count("error"):
            return "NOT CONFORMANT"
        if self.missing:
            return f"INCOMPLETE ({len(self.missing)} of {_tests(len(self.subject.expected))} did not run)"
        on_cpu = " (cpu)" if self.subject.kind in OF_DEVICES and self.subject.device == "cpu" else ""
        known = self.count("known_failure")
        failures = f" except {known} known failure{'s' * (known != 1)}" if known else ""
        return f"CONFORMANT{on_cpu}{failures}" + (f", untested: {', '.join(self.untested)}" if self.untested else "")

    @property
    def counts(self) -> str:
        """Such as `41 passed, 3 not declared`."""
        parts = [f"{self.count('passed')} passed"]
        others: tuple[Outcome, ...] = ("failed", "error", "known_failure")
        parts += [_counted(self.count(outcome), outcome) for outcome in others if self.count(outcome)]
        if self.missing and not self.word.startswith("INCOMPLETE"):
            parts.append(f"{len(self.missing)} did not run")
        if self.subject.undeclared:
            parts.append(f"{len(self.subject.undeclared)} not declared")
        return ", ".join(parts)

    def columns(self) -> tuple[str, ...]:
        """The parts of its line."""
        return self.subject.backend, self.subject.suite, self.subject.how, self.word, self.counts

    def line(self, widths: Sequence[int] = ()) -> str:
        """Backend, suite, layout, verdict, counts; `widths` are those of the columns."""
        cells = [cell.ljust(width) for cell, width in zip(self.columns(), widths or [0] * 5, strict=True)]
        return "  ".join(cell for cell, width in zip(cells, widths or [1] * 5, strict=True) if width and cell).rstrip()


def _counted(count: int, outcome: Outcome) -> str:
    return f"{count} {_WORDS[outcome]}{'s' * (count != 1 and outcome != 'failed')}"


def _tests(count: int) -> str:
    return f"{count} test{'s' * (count != 1)}"


def lines_of(verdicts: Sequence[Verdict]) -> list[str]:
    """A line for each verdict, in columns."""
    widths = [
        max((len(cell) for cell in column), default=0) for column in zip(*(v.columns() for v in verdicts), strict=True)
    ]
    return [verdict.line(widths) for verdict in verdicts]


def unwritten_of(verdicts: Iterable[Verdict]) -> list[str]:
    """What parts say is still to be written, the texts of `NotImplementedError`, and how many tests ask for it."""
    texts = (result.message for verdict in verdicts for result in verdict.results)
    found = Counter(match[1].rstrip('"') for text in texts if (match := re.search(r"NotImplementedError: (.+)", text)))
    return [f"not written yet, asked for by tests: {count}; {text}" for text, count in found.most_common()]


def verdicts_of(results: Iterable[Result], planned: Iterable[Subject] = ()) -> list[Verdict]:
    """One verdict a subject, in the order in which they came; `planned` are those that should have results."""
    found: dict[Subject, dict[str, Result]] = {subject: {} for subject in planned}
    for result in results:
        tests = found.setdefault(result.subject, {})
        before = tests.get(result.test)
        if before is None or _WORST.index(result.outcome) > _WORST.index(before.outcome):
            before_measurements = before.measurements if before is not None else ()
            tests[result.test] = replace(result, measurements=result.measurements or before_measurements)
    tested = _tested(subject for subject, tests in found.items() if tests)
    return [
        Verdict(
            subject,
            sorted(tests.values(), key=lambda result: _place(subject, result)),
            tuple(name for name in subject.capabilities if name not in tested.get(_part(subject), ())),
        )
        for subject, tests in found.items()
    ]


def _tested(ran: Iterable[Subject]) -> dict[tuple[str, ...], set[str]]:
    """By part, what was looked at in any of its layouts: a line of one worker need not say that others split."""
    tested: dict[tuple[str, ...], set[str]] = {}
    for subject in ran:
        tested.setdefault(_part(subject), set()).update(subject.tested)
    return tested


def _part(subject: Subject) -> tuple[str, ...]:
    return subject.kind, subject.backend, subject.distribution, subject.version


def _place(subject: Subject, result: Result) -> int:
    return subject.expected.index(result.test) if result.test in subject.expected else len(subject.expected)


# -- JSON --------------------------------------------------------------------------------------------------------------


def write_json(path: str | Path, verdicts: Sequence[Verdict]) -> None:
    """Write verdicts and everything measured to `path`, whole or not at all."""
    write_atomically(path, json.dumps(as_json(verdicts), indent=1, allow_nan=False) + "\n")


def as_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """What `write_json` writes."""
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(any(verdict.subject.device == "cuda" for verdict in verdicts)),
        "verdicts": [_verdict_json(verdict) for verdict in verdicts],
    }


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    subject = asdict(verdict.subject)
    del subject["expected"], subject["where"], subject["tested"]
    return {
        **subject,
        "verdict": verdict.word,
        "conformant": verdict.conformant,
        "counts": {outcome: verdict.count(outcome) for outcome in _WORST},
        "missing": verdict.missing,
        "untested": verdict.untested,
        "seconds": round(sum(result.seconds for result in verdict.results), 1),
        "contracts": largest_errors(verdict.results),
        "tests": [
            {key: value for key, value in asdict(result).items() if key != "subject"} for result in verdict.results
        ],
    }


def largest_errors(results: Iterable[Result]) -> dict[str, dict[str, Any]]:
    """For each contract with measurements: how many, the largest error, and the one nearest to its tolerance."""
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
    """The error as a part of what is allowed: above 1 it fails."""
    error, tolerance = float(measurement["error"]), float(measurement["tolerance"])
    if error == 0:
        return 0.0
    return error / tolerance if tolerance > 0 else math.inf


def machine(gpu: bool) -> dict[str, Any]:
    """Where this runs. Asks torch for the GPU's name only where one was used."""
    device = "cpu"
    if gpu:
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU that torch sees"
    return {
        "cpu": cpu_name(),
        "cores": cpu_count(),
        "device": device,
        "python": platform.python_version(),
        **{name: package_version(name) for name in ("torch", "transformers")},
    }
