"""Made-up distributions with plugins: a directory on `sys.path` that importlib.metadata takes for installed."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import pytest

from rlframework.plugins import discovery

MakeDistribution = Callable[..., str]

WORKER = """
    from rlframework.plugins.hookspec import hookimpl
    from rlframework.plugins.types import PolicyWorkerRecord

    @hookimpl
    def rlframework_policy_workers():
        return [PolicyWorkerRecord(name="{name}", target="{module}:Worker", api_version=1)]

    class Worker:
        pass
"""


@pytest.fixture(autouse=True)
def _modules_are_forgotten() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _own_distributions_are_hidden(monkeypatch):
    """So that the tests see the same plugins whether or not those of this repository are installed."""
    real = metadata.entry_points

    def hidden(group):
        return [entry for entry in real(group=group) if not entry.dist.name.startswith("rlframework-")]

    monkeypatch.setattr(discovery.metadata, "entry_points", hidden)
    monkeypatch.delenv("RLFRAMEWORK_DISABLE_PLUGINS", raising=False)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeDistribution:
    """`install(distribution, entry_point, code, version=..., requires=...)` installs a plugin `fake_<...>`."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def make(
        distribution: str,
        entry_point: str,
        code: str | None = None,
        version: str = "1.0",
        name: str = "",
        requires: Sequence[str] = (),
    ) -> str:
        module = f"fake_{distribution}_{entry_point}".replace("-", "_")
        code = WORKER.format(name=name or entry_point, module=module) if code is None else code
        (site / f"{module}.py").write_text(textwrap.dedent(code))
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        needed = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needed}")
        (info / "entry_points.txt").write_text(f"[rlframework]\n{entry_point} = {module}\n")
        return module

    return make
