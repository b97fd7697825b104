"""Results of tests, made from pytest's reports: no unauthorized skips, strict known failures, short messages.

The pytest plugin calls this for each report; `report` builds verdicts from the results.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import PluginError
from rlframework_conformance.measure import ConformanceFailure, not_written
from rlframework_conformance.report import Outcome, Result, SuiteRun, plain
from rlframework_conformance.sections import plain_paths, section_words

if TYPE_CHECKING:
    from rlframework.plugins.manager import Registered
    from rlframework.plugins.types import KnownFailure
    from rlframework_conformance.harness import Harness
    from rlframework_conformance.layouts import Layout
    from rlframework_conformance.rules import Suite


def classify(report: Any, call: Any, suite: type[Suite], registered: Registered, item: Any) -> Outcome:
    """Adjust `report` to the suites' rules and return its outcome.

    A skip is a failure, a known failure must fail as declared, and the text of a failure is short.
    """
    again = repeat_command(suite, registered, item)
    error = call.excinfo.value if call.excinfo is not None else None
    layout = str(item.callspec.params["layout"])
    known = next(
        (
            known
            for known in registered.record.known_failures
            if known.test == item.originalname and (not known.layouts or layout in known.layouts)
        ),
        None,
    )
    if report.outcome == "skipped" or hasattr(report, "wasxfail"):
        return _fail(report, _not_granted(report, error), again)
    if known is not None and report.when != "teardown" and (error is not None or report.when == "call"):
        return _classify_known_failure(report, error, known, f"the record of {registered.record.name!r}", again)
    if error is None:
        return "passed"
    if isinstance(error, ConformanceFailure | PluginError):
        _fail(report, str(error), again)
    elif text := not_written(error):
        _fail(report, text, again)
        report.unwritten = True
    else:
        report.sections.append(("to repeat it", again))
    return "failed" if report.when == "call" else "error"


def _not_granted(report: Any, error: BaseException | None) -> str:
    how = "marked xfail" if hasattr(report, "wasxfail") else "skipped"
    reason = getattr(report, "wasxfail", "") or (str(error) if error is not None else "")
    return (
        f"does not hold: every test of a conformance suite must run, but this one was {how}"
        f"{f' ({reason})' if reason else ''}\n"
        "  Known failures of the backend belong in known_failures of its record"
    )


def _classify_known_failure(
    report: Any, error: BaseException | None, known: KnownFailure, record: str, again: str
) -> Outcome:
    """Require a known failure to fail as the record says."""
    if error is not None and type(error).__name__ == known.exception:
        report.outcome = "skipped"
        report.wasxfail = f"known failure: {known.reason}"
        return "known_failure"
    declared = f"{record} declares that this fails with {known.exception} ({known.reason})"
    if error is None:
        return _fail(
            report, f"{declared}, but it passed. It is fixed: remove it from the record's known_failures", again
        )
    return _fail(report, f"{declared}, but it failed with {type(error).__name__}:\n{error}", again)


def _fail(report: Any, text: str, again: str) -> Outcome:
    report.outcome = "failed"
    report.longrepr = f"{text}\n  repeat    {again}"
    if hasattr(report, "wasxfail"):
        del report.wasxfail
    return "failed"


def repeat_command(suite: type[Suite], registered: Registered, item: Any) -> str:
    """Return the command line that runs this test alone."""
    words = ["rlframework", "conformance", registered.record.name]
    if suite.layouts:
        words += ["--layout", str(item.callspec.params["layout"])]
    if (device := item.config.getoption("--conformance-device")) != "cpu":
        words += ["--device", device]
    return shlex.join([*words, "--test", item.originalname, *section_words(suite.section)])


def result_of(
    report: Any, outcome: Outcome, suite_run: SuiteRun, test: str, contract: int, harness: Harness | None = None
) -> Result:
    """Return the result of a test from its `report` and `outcome`."""
    measurements = harness.measurements if harness is not None else ()
    return Result(
        suite_run,
        test,
        contract,
        outcome,
        getattr(report, "wasxfail", "") if outcome == "known_failure" else str(report.longrepr or ""),
        tuple(plain(asdict(measurement)) for measurement in measurements),
        round(report.duration, 3),
        tuple(harness.rejected) if harness is not None else (),
    )


class PassedTests:
    """The tests that the sound implementation has passed in this session, as files in `folder`.

    A mutant's failure counts only for these. The processes of pytest-xdist share the folder, and the suite's own run
    counts, so that no test is run twice on a sound implementation.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, kind: str, name: str, section: Mapping[str, Any], layout: Layout, test: str) -> Path:
        """Return the file that marks `test` as passed by `name` with `section` in `layout`."""
        key = json.dumps([kind, name, plain_paths(section), str(layout)], sort_keys=True, default=str)
        return self._folder / f"{test}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
