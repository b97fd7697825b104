"""The command `rlframework conformance BACKEND`: run the suites of a plugin without a test file.

It writes the test module that a backend's own repository would have into a temporary directory and runs pytest on it
with its own configuration. `pytest_plugin` and `report` decide the verdict.
"""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import ConfigError, UserError
from rlframework.base.files import check_writable, write_atomically
from rlframework.plugins.manager import PluginManager, Registered, create_manager
from rlframework_conformance import SUITES, suite_of
from rlframework_conformance.layouts import Layout, declared_layouts, enough_gpus, select_layouts
from rlframework_conformance.sections import parse_section, section_of

if TYPE_CHECKING:
    from rich.table import Table

    from rlframework_conformance.rules import Suite

_INI = """[pytest]
python_files = test_conformance.py
python_classes = Test
python_functions = test_*
timeout = 900
"""
_FOREIGN_SETTINGS = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")
"""Environment variables that would apply the caller's own pytest configuration."""


@dataclass(frozen=True)
class Request:
    """The command's options; see `rlframework conformance --help`."""

    backend: str
    workers: int | None = None
    layouts: Sequence[str] = ()
    device: str = "cpu"
    json: str | None = None
    markdown: str | None = None
    tests: Sequence[str] = ()
    mutants: bool = False
    keys: Sequence[str] = ()
    matrix: str | None = None


@dataclass(frozen=True)
class Part:
    """A plugin of the given name, its suite, and the layouts to run it in."""

    registered: Registered
    suite: type[Suite]
    layouts: Sequence[Layout]

    @property
    def class_name(self) -> str:
        """Name of the test class that runs it."""
        return "Test" + self.registered.record.kind.title().replace("_", "")

    def has(self, test: str, device: str) -> bool:
        """Return True if `test` runs in one of the layouts on `device`."""
        record = self.registered.record
        return any(test in self.suite.expected(record, layout, device) for layout in self.layouts)


def run(request: Request) -> int:
    """Run the suites; return 0 if everything conforms, else 1. Raises a `UserError` for an invalid request."""
    from rlframework_conformance.mutants import matrix

    _require_pytest()
    section = parse_section(request.keys)
    parts = find_parts(request, create_manager())
    _check(request, parts, section)
    if request.matrix:
        matrix.drop_cut_line(Path(request.matrix))
    with tempfile.TemporaryDirectory(prefix="rlframework_conformance_") as name:
        folder = Path(name)
        (folder / "pytest.ini").write_text(_INI, encoding="utf-8")
        module = folder / "test_conformance.py"
        module.write_text(module_text(parts, section, request), encoding="utf-8")
        report = folder / "report.json"
        code = _pytest(_arguments(request, parts, section, module, report))
        _write(request, report)
    if request.matrix:
        kinds = [part.registered.record.kind for part in parts]
        stored = {mutant: tests for kind in kinds for mutant, tests in matrix.stored(kind).items()}
        print(*matrix.summary(matrix.noted(Path(request.matrix)), stored), sep="\n")
    return code


def _write(request: Request, report: Path) -> None:
    """Write the requested files from `report`; if there is none, existing files are left alone."""
    from rlframework_conformance.markdown import markdown_of

    for path in filter(None, (request.json, request.markdown)):
        if report.exists():
            write_atomically(path, report.read_bytes() if path == request.json else markdown_of([report]))
            print(f"written to {path}")
        else:  # pytest could not start and has printed why
            print(f"{path} was not written: there are no verdicts", file=sys.stderr)


def table_of_tests(request: Request) -> Table:
    """Return a table of the suites' tests with their contracts and requirements."""
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for title in ("suite", "contract", "test", "needs", "runs"):
        table.add_column(title, overflow="fold")
    for part in find_parts(request, create_manager()):
        record = part.registered.record
        for name, requirement in part.suite.tests().items():
            needs = sorted(map(str, requirement.capabilities))
            needs += [f"data={requirement.data_parallel}"] * (requirement.data_parallel > 1)
            needs += ["a GPU"] * requirement.gpu
            needs += ["one worker"] * requirement.alone
            runs = "yes" if part.has(name, request.device) else "no" if requirement.declared(record) else "not declared"
            cells = (part.suite.__name__, str(requirement.contract), name, ", ".join(needs), runs)
            table.add_row(*map(Text, cells))
    return table


def find_parts(request: Request, manager: PluginManager) -> list[Part]:
    """Return the plugins named `request.backend` of all kinds with a suite; raises a `UserError` if there are none."""
    if request.workers is not None and request.layouts:
        raise ConfigError("give either --workers or --layout: a layout determines the number of workers")
    found = [manager.select(kind, request.backend) for kind in SUITES if _is_known(manager, kind, request.backend)]
    if not found:
        raise ConfigError(_unknown(request.backend, manager))
    parts = []
    for registered in found:
        suite = suite_of(registered.record.kind)
        parts.append(Part(registered, suite, _layouts(request, registered) if suite.layouts else [Layout()]))
    if (request.workers is not None or request.layouts) and not any(part.suite.layouts for part in parts):
        kinds = " and ".join(part.registered.record.kind.replace("_", " ") for part in parts)
        raise ConfigError(f"--workers and --layout have no effect on the {kinds} {request.backend!r}: leave them out")
    return parts


def _is_known(manager: PluginManager, kind: str, name: str) -> bool:
    """Return True if such a plugin exists, even a broken one; selecting that raises its own error."""
    return any(row.name == name and row.kind in (kind, None) for row in manager.listing())


def _unknown(name: str, manager: PluginManager) -> str:
    known = {kind: sorted(manager.registered(kind)) for kind in SUITES}
    if name in manager.registered("algorithm"):
        return f"{name!r} is an algorithm; algorithms have no conformance suite"
    near = difflib.get_close_matches(name, [known_name for names in known.values() for known_name in names], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    listed = "; ".join(f"{kind}: {', '.join(names) or 'none'}" for kind, names in known.items())
    return f"there is no part {name!r} with a conformance suite.{hint} Installed are {listed}"


def _layouts(request: Request, registered: Registered) -> list[Layout]:
    record = registered.record
    if request.workers is None:
        return _that_fit(request, select_layouts(record, request.layouts or ["all"]))
    found = [layout for layout in declared_layouts(record) if layout.workers == request.workers]
    if not found:
        known = ", ".join(f"'{layout}'" for layout in declared_layouts(record))
        raise ConfigError(f"{record.name!r} has no layout of {request.workers} workers; its layouts are {known}")
    return _that_fit(request, found)


def _that_fit(request: Request, layouts: list[Layout]) -> list[Layout]:
    """Return the layouts for which there is a GPU per worker, and print the others; an explicit choice must fit."""
    found = [layout for layout in layouts if enough_gpus(layout, request.device)]
    missing = "; ".join(str(layout) for layout in layouts if layout not in found)
    if missing and (request.layouts or request.workers):
        raise ConfigError(f"there are not enough GPUs for {missing}: leave it out, or use --device cpu")
    if missing:
        print(f"not tested, because there are not enough GPUs: {missing}", file=sys.stderr)
    return found


def module_text(parts: Sequence[Part], section: Mapping[str, Any], request: Request) -> str:
    """Return the test module that a backend's own repository would have."""
    lines = [f"from rlframework_conformance import {part.suite.__name__}" for part in parts]
    if request.mutants:
        lines = ["from rlframework_conformance.mutants.proof import MutantProof"]
    for part in parts:
        kind = part.registered.record.kind
        base = "MutantProof" if request.mutants else part.suite.__name__
        lines += ["", "", f"class {part.class_name}({base}):", f"    backend = {part.registered.record.name!r}"]
        lines += [f"    kind = {kind!r}"] * request.mutants + [f"    section = {dict(section)!r}"] * bool(section)
        lines += [f"    {key} = {value!r}" for key, value in _chosen_pairs(request).items() if value]
    return "\n".join(lines) + "\n"


def _chosen_pairs(request: Request) -> dict[str, Any]:
    """The attributes of `MutantProof` that choose its pairs."""
    path = str(Path(request.matrix).absolute()) if request.matrix else ""
    return {"only": tuple(request.tests), "matrix": path} if request.mutants else {}


def _check(request: Request, parts: Sequence[Part], section: Mapping[str, Any]) -> None:
    """Reject everything that is known to be invalid before pytest starts."""
    _check_files(request)
    given = {"--workers": request.workers, "--layout": request.layouts}
    given |= {"--json": request.json, "--markdown": request.markdown}
    if request.matrix and request.tests:
        raise ConfigError("--test cannot be combined with --kill-matrix, which tries every test")
    if request.mutants and (wrong := [name for name, value in given.items() if value]):
        raise ConfigError(
            f"{' and '.join(wrong)} cannot be combined with --mutants: "
            "each mutant has its own layout, and the proof has no verdicts. Choose mutants by a test that must catch "
            "them: --test NAME"
        )
    if request.device not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {request.device!r}; it must be cpu or cuda")
    if request.device == "cuda" and not import_module("torch").cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU")
    for test in request.tests:
        _check_test(test, request, parts)
    for part in parts:
        section_of(part.registered.record, section)


def _check_files(request: Request) -> None:
    for option, path in (("--json", request.json), ("--markdown", request.markdown), ("--kill-matrix", request.matrix)):
        folder = Path(path or ".").absolute().parent
        if path and not folder.is_dir():
            raise ConfigError(f"{option} {path}: the folder {folder} does not exist; create it first")
        if path and Path(path).is_dir():
            raise ConfigError(f"{option} {path}: this is a folder; give a file in it")
        if path:
            check_writable(folder)


def _check_test(test: str, request: Request, parts: Sequence[Part]) -> None:
    known = [name for part in parts for name in part.suite.tests()]
    name = request.backend
    if test not in known:
        near = difflib.get_close_matches(test, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--test: the suites of {name!r} have no test {test!r}.{hint} --list shows them")
    if not any(part.has(test, request.device) for part in parts):
        raise ConfigError(f"--test: {test} does not apply to {name!r} in these layouts on {request.device}; see --list")


def _chosen(request: Request, parts: Sequence[Part], section: Mapping[str, Any]) -> list[str]:
    """Return the tests of `--test` as `class::test`; with `--mutants`, the test that meets the mutants."""
    if not request.mutants:
        return [
            f"{part.class_name}::{test}" for test in request.tests for part in parts if part.has(test, request.device)
        ]
    from rlframework_conformance.mutants.proof import MutantProof

    found = []
    for part in parts if request.tests else ():
        record = part.registered.record
        chosen = {"kind": record.kind, "section": section, **_chosen_pairs(request)}
        proof: type[MutantProof] = type("Proof", (MutantProof,), chosen)
        found += [f"{part.class_name}::test_mutant_is_caught"] * bool(proof.cases(record, request.device))
    if request.tests and not found:
        raise ConfigError(
            f"--test: no mutant that applies to {request.backend!r} is caught by {', '.join(request.tests)}"
        )
    return found


def _arguments(
    request: Request, parts: Sequence[Part], section: Mapping[str, Any], module: Path, report: Path
) -> list[str]:
    folder, chosen = module.parent, [f"{module}::{found}" for found in _chosen(request, parts, section)]
    layouts = dict.fromkeys(str(layout) for part in parts if part.suite.layouts for layout in part.layouts)
    return [
        *(chosen or [str(module)]),
        *("-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "--import-mode", "importlib"),
        *("-q", "-rsfE" if request.mutants else "-rfE", "--disable-warnings", "-p", "no:cacheprovider"),
        *(word for layout in layouts for word in ("--conformance-layout", layout)),
        *("--conformance-device", request.device, "--conformance-json", str(report)),
    ]


def _pytest(arguments: Sequence[str]) -> int:
    import pytest

    before = {name: os.environ.pop(name) for name in _FOREIGN_SETTINGS if name in os.environ}
    try:
        return int(pytest.main(list(arguments)) != 0)
    finally:
        os.environ.update(before)


def _require_pytest() -> None:
    missing = [module for module in ("pytest", "pytest_timeout") if find_spec(module) is None]
    if missing:
        raise UserError(
            f"the conformance suites need {' and '.join(missing).replace('_', '-')}: "
            "pip install 'rlframework-core[conformance]'"
        )
