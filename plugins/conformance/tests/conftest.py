"""Parts of tests of parity, and of tests that run pytest on a tiny suite (see `probe_tiny_suite`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from probe_tiny_suite import PARTS, SUITE

from rlframework.plugins.manager import create_manager
from rlframework_conformance import cases


@pytest.fixture
def wide_terminal(monkeypatch):
    """Whole lines of output."""
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.model("untied", tmp_path_factory.mktemp("models"))


@pytest.fixture
def manager():
    return create_manager(["probe_parity_backends"])


@pytest.fixture(scope="session")
def parts_are_imported():
    """Import once instead of in each run of pytest, which forgets the modules that it imported."""
    from rlframework_conformance import report  # noqa: F401

    create_manager()


@pytest.fixture
def tests(parts_are_imported, pytester, monkeypatch):
    """`tests("class TestIt(TinySuite): ...")` writes a test module beside an installed plugin and its suite."""
    monkeypatch.delenv("RLFRAMEWORK_DISABLE_PLUGINS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")
    info = pytester.mkdir("tiny-1.5.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[rlframework]\ntiny = tiny_parts\nruined = tiny_ruin\n")
    pytester.makepyfile(tiny_parts=PARTS, tiny_suite=SUITE, tiny_ruin="raise ImportError('libruin.so is missing')")
    pytester.syspathinsert()

    def write(body):
        pytester.makepyfile(test_it=f"import pytest\nfrom tiny_suite import EngineSuite, TinySuite\n\n{body}")

    def of(backend, suite="TinySuite", more="pass"):
        write(f"class TestIt({suite}):\n    backend = {backend!r}\n    {more}\n")

    write.of = of
    return write
