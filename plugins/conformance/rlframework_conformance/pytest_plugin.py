"""The pytest plugin: the options of a suite run. Loaded by pytest wherever this is installed.

Everything else is in `session`, which two hooks here register once a suite is imported. Options alone are not enough:
pytest imports test modules during collection, and with pytest-xdist only the worker processes collect, so that the
controller learns of suites from their output. Until then nothing but this module is imported.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rlframework_conformance.session import ConformanceSession

SESSION = "rlframework_conformance.session"
"""Name of the session among pytest's plugins."""
WORKER_OUTPUT = "rlframework_conformance_planned"
"""Key of the planned suite runs in the output of a worker process of pytest-xdist."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a run."""
    group = parser.getgroup("rlframework", "rlframework conformance")
    group.addoption(
        "--conformance-layout",
        action="append",
        metavar="LAYOUT",
        help="such as data=2,tensor=2, repeatable; also `quick` (the default: one worker and one layout of two) or "
        "`all` layouts that the backend declares",
    )
    group.addoption(
        "--conformance-device", choices=("cpu", "cuda"), default="cpu", help="device of the tests (default: cpu)"
    )
    group.addoption(
        "--conformance-json", type=_writable, metavar="FILE", help="write the verdicts and all measurements to FILE"
    )


def _writable(path: str) -> str:
    """Return `path`, so that an unwritable report is an error before the run."""
    from rlframework.base.errors import UserError
    from rlframework.base.files import check_writable

    try:
        check_writable(Path(path).absolute().parent)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def _session(config: pytest.Config) -> ConformanceSession:
    """Return the session, registered on first use."""
    from rlframework_conformance.session import ConformanceSession

    session: ConformanceSession | None = config.pluginmanager.get_plugin(SESSION)
    if session is None:
        session = ConformanceSession(config, WORKER_OUTPUT)
        config.pluginmanager.register(session, SESSION)
    return session


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> list[pytest.Item] | None:
    """Register the session after the import of a suite, and pass on the call, which the session would miss."""
    if "rlframework_conformance.rules" not in sys.modules or collector.config.pluginmanager.hasplugin(SESSION):
        return None
    return _session(collector.config).pytest_pycollect_makeitem(collector, name, obj)


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    """Count tests that failed because something is not implemented yet apart: they are summarized at the end."""
    return ("not implemented yet", "N", "NOT IMPLEMENTED") if getattr(report, "unwritten", False) else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """With pytest-xdist: collect the plan of a worker process."""
    if planned := getattr(node, "workeroutput", {}).get(WORKER_OUTPUT):
        _session(node.config).add_planned(planned)
