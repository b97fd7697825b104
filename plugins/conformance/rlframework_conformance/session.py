"""The session plugin of a suite run: runs a suite once per layout and reports everything that did not run.

`pytest_plugin` registers it once a suite is imported. An unauthorized skip is a failure, a known failure must fail as
its record says, and tests that did not run make the verdict INCOMPLETE.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import pytest

from rlframework.base.errors import ConfigError, PluginError
from rlframework.plugins.manager import PluginManager, Registered, create_manager
from rlframework_conformance.layouts import Layout, select_layouts
from rlframework_conformance.report import (
    PROPERTY,
    RESULT_JSON,
    SUITE_RUN_JSON,
    SuiteRun,
    Verdict,
    lines_of,
    proof_of,
    results_in,
    unwritten_of,
    verdicts_of,
    write_json,
)
from rlframework_conformance.results import PassedTests, classify, result_of
from rlframework_conformance.rules import Suite, changed_since_sealed

if TYPE_CHECKING:
    from rlframework_conformance.harness import Harness
    from rlframework_conformance.mutants.proof import MutantProof

HARNESS: pytest.StashKey[Harness] = pytest.StashKey()
PASSED = pytest.StashKey[bool]()


class ConformanceSession:
    """The hooks and fixtures of one pytest session, with its plugin manager and planned suite runs.

    `worker_output`: key of the planned suite runs in the output of a worker process of pytest-xdist.
    """

    def __init__(self, config: pytest.Config, worker_output: str) -> None:
        self._config = config
        self._worker_output = worker_output
        self._device: str = config.getoption("--conformance-device")
        self._suite_runs: dict[tuple[type[Suite], Layout, str], SuiteRun] = {}
        self._planned: dict[SuiteRun, None] = {}
        """The suite runs that were collected; each should have results in the end."""

    @cached_property
    def _manager(self) -> PluginManager:
        return create_manager()

    def _registered(self, suite: type[Suite] | type[MutantProof]) -> Registered:
        if not suite.backend:
            raise pytest.Collector.CollectError(f"{suite.__module__}.{suite.__qualname__} must set `backend`")
        try:
            registered = self._manager.select(suite.kind, suite.backend)
        except PluginError as error:
            raise pytest.Collector.CollectError(f"{suite.__qualname__}: {error}") from error
        if not issubclass(suite, Suite):
            return registered
        unknown = [known.test for known in registered.record.known_failures if known.test not in suite.tests()]
        if unknown:
            raise pytest.Collector.CollectError(
                f"{suite.__qualname__}: known_failures of {suite.backend!r}, of {registered.blame}, names "
                f"{', '.join(unknown)}, but the suite has no such test"
            )
        return registered

    def _suite_run(self, suite: type[Suite], layout: Layout, path: Path) -> SuiteRun:
        """Return the suite run shared by all tests of a class in a layout, created once."""
        key = suite, layout, f"{path.name}::{suite.__qualname__}"
        if key not in self._suite_runs:
            self._suite_runs[key] = SuiteRun.of(suite, self._registered(suite), layout, self._device, key[2])
        return self._suite_runs[key]

    def _suite_run_of(self, item: Any) -> SuiteRun:
        return self._suite_run(item.cls, item.callspec.params["layout"], item.path)

    # -- collection ----------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector: Any, name: str, obj: object) -> list[pytest.Item] | None:
        """Keep `Suite.tests` from being collected, and reject classes that pytest would silently ignore."""
        if name == "tests" and _is_suite(getattr(collector, "obj", None)):
            return []
        if _is_suite(obj) and obj.backend:
            _require_whole(obj)
            _require_collected(collector, obj)
        return None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize suite tests by layout, and proof tests by mutant and test.

        The expected results are planned here, from the class, so that tests deselected later are noticed.
        """
        if "mutant_case" in metafunc.fixturenames and _is_proof(metafunc.cls):
            from rlframework_conformance.mutants.proof import case_id

            cases = metafunc.cls.cases(self._registered(metafunc.cls).record, self._device)
            metafunc.parametrize("mutant_case", cases, ids=[case_id(*case) for case in cases])
        elif _is_suite(metafunc.cls) and "layout" in metafunc.fixturenames:
            suite = metafunc.cls
            record = self._registered(suite).record
            layouts = [Layout()]
            if suite.layouts:
                try:
                    layouts = select_layouts(record, self._layout_words(suite))
                except ConfigError as error:
                    raise pytest.Collector.CollectError(str(error)) from error
            path = metafunc.definition.path
            self._planned.update(dict.fromkeys(self._suite_run(suite, layout, path) for layout in layouts))
            ids = [str(layout) if suite.layouts else record.name for layout in layouts]
            metafunc.parametrize("layout", layouts, ids=ids, scope="class")

    def _layout_words(self, suite: type[Suite]) -> list[str]:
        """Return the requested layouts, with the class's own layouts in place of `quick` and `all`."""
        asked = self._config.getoption("--conformance-layout") or ["quick"]
        layouts_of_class = {"quick": suite.quick, "all": suite.every}
        return [word for given in asked for word in layouts_of_class.get(given) or [given]]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Deselect tests that do not apply: undeclared capabilities, or nothing to test in the layout."""
        for item in filter(_is_of_suite, items):
            _require_own_harness(item)
        items[:] = [
            item for item in items if not _is_of_suite(item) or item.originalname in self._suite_run_of(item).expected
        ]

    # -- fixtures ------------------------------------------------------------------------------------------------------

    @pytest.fixture
    def harness(
        self, request: pytest.FixtureRequest, layout: Layout, tmp_path: Path, tests_passed_by_sound_part: PassedTests
    ) -> Iterator[Harness]:
        """The argument of a suite's tests; see `rlframework_conformance.harness.Harness`."""
        suite, name = request.cls, request.node.originalname
        _require_whole(suite)
        record = self._registered(suite).record
        if record.py_executable is None:
            self._manager.load(record)  # an import error is reported as such, before any test runs
        made = suite.open_harness(
            record,
            layout,
            manager=self._manager,
            device=self._device,
            folder=tmp_path,
            models=request.getfixturevalue("conformance_models"),
        )
        if name in suite.tests():
            made.contract = suite.tests()[name].contract
        request.node.stash[HARNESS] = made
        yield made
        made.close()
        if request.node.stash.get(PASSED, False) and not made.rejected:
            tests_passed_by_sound_part.path(suite.kind, record.name, suite.section, layout, name).touch()

    @pytest.fixture
    def open_proof_harness(
        self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Callable[..., Harness]:
        """`open(suite, layout, test, mutant)`; see `rlframework_conformance.mutants.proof`."""
        from rlframework_conformance.mutants.proof import open_harness

        return open_harness(
            request.cls,
            self._registered(request.cls).record,
            self._manager,
            self._device,
            request.getfixturevalue("conformance_models"),
            tmp_path_factory.mktemp,
        )

    @pytest.fixture(scope="session")
    def tests_passed_by_sound_part(self, tmp_path_factory: pytest.TempPathFactory) -> PassedTests:
        """The tests that sound implementations passed in this session, in any process."""
        own = tmp_path_factory.getbasetemp()
        return PassedTests((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "sound")

    @pytest.fixture(scope="session")
    def conformance_models(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A folder for the tiny models that tests share."""
        return tmp_path_factory.mktemp("conformance_models")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: Any, nextitem: Any) -> None:
        """End idle worker processes after the last test of the class that started them."""
        warm = sys.modules.get("rlframework_conformance.policies")
        if warm is not None and getattr(nextitem, "cls", None) is not item.cls:
            warm.end_idle()

    # -- reporting -----------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: Any, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Classify the report and attach the measurements; see `results`."""
        report = yield
        if not _is_of_suite(item):
            return report
        outcome = classify(report, call, item.cls, self._registered(item.cls), item)
        item.stash[PASSED] = report.when == "call" and outcome == "passed"
        if report.when == "call" or outcome != "passed":
            test = item.originalname
            contract = item.cls.tests()[test].contract
            result = result_of(report, outcome, self._suite_run_of(item), test, contract, item.stash.get(HARNESS, None))
            report.user_properties.append((PROPERTY, RESULT_JSON.dump_json(result).decode()))
        return report

    def add_planned(self, planned: Sequence[str]) -> None:
        """Add the plan of a worker process of pytest-xdist."""
        self._planned.update(dict.fromkeys(map(SUITE_RUN_JSON.validate_json, planned)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Pass on the plan; fail a session in which tests are missing that were not deselected explicitly."""
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[self._worker_output] = [
                SUITE_RUN_JSON.dump_json(suite_run).decode() for suite_run in self._planned
            ]
        elif exitstatus == 0 and not _chosen_by_hand(self._config) and any(found.missing for found in self._verdicts()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _verdicts(self) -> list[Verdict]:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        return verdicts_of(results_in(reporter.stats) if reporter is not None else [], self._planned)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None]:
        """Print at the end a line per backend, suite and layout, what is not implemented yet, and counts of mutants."""
        yield
        if line := proof_of(terminalreporter.stats):
            terminalreporter.line(line)
        if not self._planned or self._config.option.collectonly:
            return
        verdicts = self._verdicts()
        terminalreporter.section("conformance")
        for line in [*lines_of(verdicts), *unwritten_of(verdicts)]:
            terminalreporter.line(line)
        if path := self._config.getoption("--conformance-json"):
            write_json(path, verdicts)


def _is_suite(found: object) -> TypeGuard[type[Suite]]:
    return isinstance(found, type) and issubclass(found, Suite)


def _is_of_suite(item: Any) -> bool:
    suite = getattr(item, "cls", None)
    return _is_suite(suite) and item.originalname in suite.tests()


def _is_proof(found: object) -> TypeGuard[type[MutantProof]]:
    """Return True for a `MutantProof`; other classes may have a fixture `mutant_case` of their own."""
    proof = sys.modules.get("rlframework_conformance.mutants.proof")
    return proof is not None and isinstance(found, type) and issubclass(found, proof.MutantProof)


def _require_whole(suite: type[Suite]) -> None:
    """Reject a suite whose tests a subclass or other code has changed."""
    for name in ("__init__", "__new__", "__test__"):
        if getattr(suite, name, None) is not getattr(Suite, name, None):
            raise pytest.Collector.CollectError(
                f"{suite.__qualname__} sets {name}, so pytest would not run it: remove it"
            )
    if changed := changed_since_sealed(suite):
        names = ", ".join(f"{suite.__qualname__}.{name}" for name in changed)
        raise pytest.Collector.CollectError(
            f"{names} was changed: run the suite unmodified. Known failures of the backend belong in known_failures of "
            "its record"
        )


def _require_collected(collector: Any, suite: type[Suite]) -> None:
    """Reject names that pytest or its configuration would ignore; base classes of others may have any name."""
    names = [name for name, value in vars(collector.obj).items() if value is suite]
    if not any(map(collector.classnamefilter, names)) and not suite.__subclasses__():
        raise pytest.Collector.CollectError(
            f"{suite.__qualname__} runs a conformance suite, but pytest does not collect classes of that name: rename "
            f"it to Test{suite.__name__} (or see python_classes in the pytest configuration)"
        )
    if passed_over := [test for test in suite.tests() if not collector.funcnamefilter(test)]:
        raise pytest.Collector.CollectError(
            f"{suite.__qualname__}: python_functions in the pytest configuration ignores {passed_over[0]} and "
            f"{len(passed_over) - 1} more tests of the suite: add test_*"
        )


def _require_own_harness(item: Any) -> None:
    """Reject a fixture of the caller that replaces the suites' `harness`."""
    found = item._fixtureinfo.name2fixturedefs.get("harness", ())
    if found and found[-1].func.__module__ != __name__:
        raise pytest.UsageError(
            f"{found[-1].func.__module__} has a fixture `harness`, which hides that of the conformance suites from "
            f"{item.nodeid}: give it another name"
        )


def _chosen_by_hand(config: pytest.Config) -> bool:
    """Return True if the command line itself selects tests; `addopts` and `testpaths` of a file do not count."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("-k", "-m", "--deselect"):
        parser.add_argument(name, dest="chosen", action="append")
    for names in (("--lf", "--last-failed"), ("--sw", "--stepwise"), ("--sw-skip", "--stepwise-skip")):
        parser.add_argument(*names, dest="fewer", action="store_true")
    parser.add_argument("--co", "--collect-only", "--collectonly", dest="fewer", action="store_true")
    for flag in "qvsxl":  # they may precede a relevant letter, as in -xk
        parser.add_argument(f"-{flag}", action="count")
    found, others = parser.parse_known_args([str(word) for word in config.invocation_params.args])
    return bool(found.fewer or any(found.chosen or ()) or any("::" in word for word in others))
