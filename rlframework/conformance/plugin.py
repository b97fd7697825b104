"""The pytest plugin: runs a suite once per layout and reports everything that did not run.

Loaded by pytest wherever rlframework-core is installed; imports no torch. An unauthorized skip is a failure, a known
failure must fail as its record says, and tests that did not run make the verdict INCOMPLETE.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlframework.conformance.layouts import Layout, select_layouts
from rlframework.conformance.rules import Suite, changed_since_sealed
from rlframework.errors import ConfigError, PluginError, UserError
from rlframework.files import check_writable

if TYPE_CHECKING:
    from rlframework.conformance.harness import Harness
    from rlframework.conformance.mutants.proof import MutantProof
    from rlframework.conformance.report import SuiteRun, Verdict
    from rlframework.conformance.results import PassedTests
    from rlframework.plugins.manager import PluginManager, Registered

MANAGER: pytest.StashKey[PluginManager] = pytest.StashKey()
HARNESS: pytest.StashKey[Harness] = pytest.StashKey()
PASSED = pytest.StashKey[bool]()
SUITE_RUNS: pytest.StashKey[dict[tuple[type[Suite], Layout, str], SuiteRun]] = pytest.StashKey()
PLANNED = pytest.StashKey[dict[str, None]]()
"""The suite runs that were collected, as JSON; each should have results in the end."""
WORKER_OUTPUT = "rlframework_conformance_planned"


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
    group.addoption("--conformance-json", metavar="FILE", help="write the verdicts and all measurements to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Start with an empty plan, and reject an unwritable report file before the run."""
    config.stash[PLANNED] = {}
    if path := config.getoption("--conformance-json"):
        try:
            check_writable(Path(path).absolute().parent)
        except UserError as error:
            raise pytest.UsageError(f"--conformance-json: {error}") from error


def manager_of(config: pytest.Config) -> PluginManager:
    """Return the plugin manager of this session."""
    if MANAGER not in config.stash:
        from rlframework.plugins.manager import create_manager

        config.stash[MANAGER] = create_manager()
    return config.stash[MANAGER]


# -- collection --------------------------------------------------------------------------------------------------------


def _suite_of(node: Any) -> type[Suite] | None:
    cls = getattr(node, "cls", None)
    return cls if isinstance(cls, type) and issubclass(cls, Suite) else None


def _is_of_suite(item: Any) -> bool:
    suite = _suite_of(item)
    return suite is not None and item.originalname in suite.tests()


def _registered(config: pytest.Config, suite: type[Suite] | type[MutantProof]) -> Registered:
    if not suite.backend:
        raise pytest.Collector.CollectError(f"{suite.__module__}.{suite.__qualname__} must set `backend`")
    try:
        registered = manager_of(config).select(suite.kind, suite.backend)
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


def _suite_run(item: Any) -> SuiteRun:
    return _suite_run_of(item.config, item.cls, item.callspec.params["layout"], item.path)


def _suite_run_of(config: pytest.Config, suite: type[Suite], layout: Layout, path: Path) -> SuiteRun:
    """Return the suite run shared by all tests of a class in a layout, created once."""
    from rlframework.conformance.report import SuiteRun

    known = config.stash.setdefault(SUITE_RUNS, {})
    where = f"{path.name}::{suite.__qualname__}"
    if (suite, layout, where) not in known:
        device = config.getoption("--conformance-device")
        known[suite, layout, where] = SuiteRun.of(suite, _registered(config, suite), layout, device, where)
    return known[suite, layout, where]


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> list[pytest.Item] | None:
    """Keep `Suite.tests` from being collected, and reject classes that pytest would silently ignore."""
    if name == "tests" and isinstance(getattr(collector, "obj", None), type) and issubclass(collector.obj, Suite):
        return []
    if isinstance(obj, type) and issubclass(obj, Suite) and obj.backend:
        _require_whole(obj)
        _require_collected(collector, obj)
    return None


def _require_whole(suite: type[Suite]) -> None:
    """Reject changes to a suite made after class creation, which `rules` checks only at that time."""
    for name in ("__init__", "__new__", "__test__"):
        if getattr(suite, name, None) is not getattr(Suite, name, None):
            raise pytest.Collector.CollectError(
                f"{suite.__qualname__} sets {name}, so pytest would not run it: remove it"
            )
    if changed := changed_since_sealed(suite):
        names = ", ".join(f"{suite.__qualname__}.{name}" for name in changed)
        raise pytest.Collector.CollectError(f"{names} was changed: run the suite unmodified")


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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize suite tests by layout, and proof tests by mutant and test.

    The expected results are planned here, from the class, so that tests deselected later are noticed.
    """
    if "mutant_case" in metafunc.fixturenames and _is_proof(metafunc.cls):
        from rlframework.conformance.mutants.proof import case_id

        device = metafunc.config.getoption("--conformance-device")
        cases = metafunc.cls.cases(_registered(metafunc.config, metafunc.cls).record, device)
        metafunc.parametrize("mutant_case", cases, ids=[case_id(mutant, test) for mutant, test in cases])
        return
    suite = _suite_of(metafunc)
    if suite is None or "layout" not in metafunc.fixturenames:
        return
    registered = _registered(metafunc.config, suite)
    layouts = [Layout()]
    if suite.layouts:
        try:
            layouts = select_layouts(registered.record, _words(metafunc.config, suite))
        except ConfigError as error:
            raise pytest.Collector.CollectError(str(error)) from error
    for layout in layouts:
        suite_run = _suite_run_of(metafunc.config, suite, layout, metafunc.definition.path)
        metafunc.config.stash[PLANNED][suite_run.to_json()] = None
    ids = [str(layout) if suite.layouts else registered.record.name for layout in layouts]
    metafunc.parametrize("layout", layouts, ids=ids, scope="class")


def _words(config: pytest.Config, suite: type[Suite]) -> list[str]:
    """Return the requested layouts, with the class's own layouts in place of `quick` and `all`."""
    asked = config.getoption("--conformance-layout") or ["quick"]
    layouts_of_class = {"quick": suite.quick, "all": suite.every}
    return [word for given in asked for word in layouts_of_class.get(given) or [given]]


def _is_proof(cls: Any) -> Any:
    """Return True for a `MutantProof`; other classes may have a fixture `mutant_case` of their own."""
    if not isinstance(cls, type):
        return False
    from rlframework.conformance.mutants.proof import MutantProof

    return issubclass(cls, MutantProof)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that do not apply: undeclared capabilities, or nothing to test in the layout."""
    for item in filter(_is_of_suite, items):
        _require_own_harness(item)
    suite_runs = {id(item): _suite_run(item) for item in items if _is_of_suite(item)}
    items[:] = [item for item in items if id(item) not in suite_runs or _name(item) in suite_runs[id(item)].expected]


def _name(item: Any) -> str:
    return str(item.originalname)


def _require_own_harness(item: Any) -> None:
    """Reject a fixture of the caller that replaces the suites' `harness`."""
    found = item._fixtureinfo.name2fixturedefs.get("harness", ())
    if found and found[-1].func.__module__ != __name__:
        raise pytest.UsageError(
            f"{found[-1].func.__module__} has a fixture `harness`, which hides that of the conformance suites from "
            f"{item.nodeid}: give it another name"
        )


@pytest.fixture
def harness(
    request: pytest.FixtureRequest, layout: Layout, tmp_path: Path, tests_passed_by_sound_part: PassedTests
) -> Iterator[Harness]:
    """The argument of a suite's tests; see `rlframework.conformance.harness.Harness`."""
    suite, name = request.cls, request.node.originalname
    _require_whole(suite)
    record = _registered(request.config, suite).record
    manager = manager_of(request.config)
    if record.py_executable is None:
        manager.load(record)  # an import error is reported as such, before any test runs
    made = suite.open_harness(
        record,
        layout,
        manager=manager,
        device=request.config.getoption("--conformance-device"),
        folder=tmp_path,
        models=request.getfixturevalue("conformance_models"),
    )
    if name in suite.tests():
        made.contract = suite.tests()[name].contract
    request.node.stash[HARNESS] = made
    yield made
    made.close()
    if request.node.stash.get(PASSED, False):
        tests_passed_by_sound_part.path(suite.kind, record.name, suite.section, layout, name).touch()


@pytest.fixture
def open_proof_harness(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Harness]:
    """`open(suite, layout, test, mutant)`; see `rlframework.conformance.mutants.proof`."""
    from rlframework.conformance.mutants.proof import open_harness

    return open_harness(
        request.cls,
        _registered(request.config, request.cls).record,
        manager_of(request.config),
        request.config.getoption("--conformance-device"),
        request.getfixturevalue("conformance_models"),
        tmp_path_factory.mktemp,
    )


@pytest.fixture(scope="session")
def tests_passed_by_sound_part(tmp_path_factory: pytest.TempPathFactory) -> PassedTests:
    """The tests that sound implementations passed in this session, in any process."""
    from rlframework.conformance.results import PassedTests

    own = tmp_path_factory.getbasetemp()
    return PassedTests((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "sound")


@pytest.fixture(scope="session")
def conformance_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the tiny models that tests share."""
    return tmp_path_factory.mktemp("conformance_models")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: Any, nextitem: Any) -> None:
    """End idle worker processes after the last test of the class that started them."""
    warm = sys.modules.get("rlframework.conformance.worker_pool")
    if warm is not None and getattr(nextitem, "cls", None) is not item.cls:
        warm.end_idle()


# -- reporting ---------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: Any, call: pytest.CallInfo[None]) -> Any:
    """Classify the report and attach the measurements; see `results`."""
    report = yield
    if not _is_of_suite(item):
        return report
    from rlframework.conformance.report import PROPERTY
    from rlframework.conformance.results import classify, result_of

    outcome = classify(report, call, item.cls, _registered(item.config, item.cls), item)
    item.stash[PASSED] = report.when == "call" and outcome == "passed"
    if report.when == "call" or outcome != "passed":
        contract = item.cls.tests()[item.originalname].contract
        result = result_of(
            report, outcome, _suite_run(item), item.originalname, contract, item.stash.get(HARNESS, None)
        )
        report.user_properties.append((PROPERTY, result.to_json()))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Pass on the plan; fail a session in which tests are missing that nobody deselected explicitly."""
    config = session.config
    planned = config.stash[PLANNED]
    if hasattr(config, "workeroutput"):
        config.workeroutput[WORKER_OUTPUT] = list(planned)
    elif exitstatus == 0 and not _chosen_by_hand(config) and any(found.missing for found in _verdicts(config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """With pytest-xdist: collect the plan of a worker process."""
    planned: list[str] = getattr(node, "workeroutput", {}).get(WORKER_OUTPUT, [])
    node.config.stash[PLANNED].update(dict.fromkeys(planned))


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


def _verdicts(config: pytest.Config) -> list[Verdict]:
    from rlframework.conformance.report import SuiteRun, results_in, verdicts_of

    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    results = results_in(reporter.stats) if reporter is not None else []
    return verdicts_of(results, [SuiteRun.from_json(json.loads(text)) for text in config.stash[PLANNED]])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Generator[None]:
    """Print a line per backend, suite and layout at the end, and the features not implemented yet."""
    yield
    if not config.stash[PLANNED] or config.option.collectonly:
        return
    from rlframework.conformance.report import lines_of, unwritten_of, write_json

    verdicts = _verdicts(config)
    terminalreporter.section("conformance")
    for line in [*lines_of(verdicts), *unwritten_of(verdicts)]:
        terminalreporter.line(line)
    if path := config.getoption("--conformance-json"):
        write_json(path, verdicts)
