"""What a test's report becomes: no skip that nobody granted, known failures strict, failures short.

Called by the pytest plugin with each report; `report` makes verdicts of the results.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlframework.conformance.measure import ConformanceFailure
from rlframework.conformance.report import Outcome, Result, Subject, plain
from rlframework.conformance.sections import section_words
from rlframework.errors import PluginError

if TYPE_CHECKING:
    from rlframework.conformance.bench import Bench
    from rlframework.conformance.rules import Suite
    from rlframework.plugins.manager import Registered
    from rlframework.plugins.types import KnownFailure


def judge(report: Any, call: Any, suite: type[Suite], registered: Registered, item: Any) -> Outcome:
    """Make `report` say what counts: no skip that nobody granted, known failures strict, failures short."""
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
        return _judge_known(report, error, known, f"the record of {registered.record.name!r}", again)
    if error is None:
        return "passed"
    if isinstance(error, ConformanceFailure | PluginError):
        _fail(report, str(error), again)
    else:
        report.sections.append(("to repeat it", again))
    return "failed" if report.when == "call" else "error"


def _not_granted(report: Any, error: BaseException | None) -> str:
    how = "marked xfail" if hasattr(report, "wasxfail") else "skipped"
    reason = getattr(report, "wasxfail", "") or (str(error) if error is not None else "")
    return (
        f"does not hold: every test of a conformance suite runs, and this one was {how}"
        f"{f' ({reason})' if reason else ''}\n"
        "  What the backend is known to fail belongs on its record, in known_failures"
    )


def _judge_known(report: Any, error: BaseException | None, known: KnownFailure, record: str, again: str) -> Outcome:
    """A known failure must be the one that the record tells of, and must still be there."""
    if error is not None and type(error).__name__ == known.exception:
        report.outcome = "skipped"
        report.wasxfail = f"known failure: {known.reason}"
        return "known_failure"
    says = f"{record} says that this fails with {known.exception} ({known.reason})"
    if error is None:
        return _fail(report, f"{says}, and it passed. It is mended: take it off the record's known_failures", again)
    return _fail(report, f"{says}, and it failed with {type(error).__name__}:\n{error}", again)


def _fail(report: Any, text: str, again: str) -> Outcome:
    report.outcome = "failed"
    report.longrepr = f"{text}\n  repeat    {again}"
    if hasattr(report, "wasxfail"):
        del report.wasxfail
    return "failed"


def repeat_command(suite: type[Suite], registered: Registered, item: Any) -> str:
    """The command line that runs this test again, alone."""
    words = ["rlframework", "conformance", registered.record.name]
    if suite.layouts:
        words += ["--layout", str(item.callspec.params["layout"])]
    if (device := item.config.getoption("--conformance-device")) != "cpu":
        words += ["--device", device]
    return shlex.join([*words, "--test", item.originalname, *section_words(suite.section)])


def result_of(
    report: Any, outcome: Outcome, subject: Subject, test: str, contract: int, bench: Bench | None = None
) -> Result:
    """What `report`, judged to be `outcome`, says of its test."""
    measurements = bench.measurements if bench is not None else ()
    return Result(
        subject,
        test,
        contract,
        outcome,
        getattr(report, "wasxfail", "") if outcome == "known_failure" else str(report.longrepr or ""),
        tuple(plain(asdict(measurement)) for measurement in measurements),
        round(report.duration, 3),
    )
