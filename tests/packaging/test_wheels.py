"""Wheels of all distributions; those of the first run are installed into a separate environment.

That has links to what they say they need, and to what that needs, as installed here: so nothing is fetched, and nothing
else can be imported. `make outside` has an index fill an environment instead.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SOURCES = {
    "rlframework-core": ROOT,
    **{f"rlframework-{path.parent.name}": path.parent for path in ROOT.glob("plugins/*/pyproject.toml")},
}
FIRST_RUN = [
    f"rlframework-{name}"
    for name in ("core", "distillation", "dtensor", "preferences", "report", "tools", "transformers")
]
"""The distributions that `rlframework-core[dtensor]` installs."""
MINUTES = 60.0
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(15 * MINUTES), pytest.mark.xdist_group("wheels")]


def run(*command: str | Path, cwd: Path, minutes: float = 1) -> str:
    """Standard output of a command, in an environment that does not see this source tree."""
    hidden = {"PYTHONPATH", "RLFRAMEWORK_DISABLE_PLUGINS", "VIRTUAL_ENV"}
    clean = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True, timeout=minutes * MINUTES
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def pip_for(home: Path) -> tuple[str | Path, ...]:
    """This environment's pip, at work on the one at `home`."""
    return (*PIP, "--python", home / "bin" / "python")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """The built wheels by distribution, all in one directory."""
    place = tmp_path_factory.mktemp("wheels")
    words = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", place)
    run(*PIP, *words, *SOURCES.values(), cwd=place, minutes=5)
    return {path.name.split("-")[0].replace("_", "-"): path for path in place.glob("*.whl")}


def needed(requirements: Iterable[str], extra: str = "") -> Iterator[metadata.Distribution]:
    """The distributions that `requirements` name, and those that these need; some more than once."""
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name.startswith("rlframework"):
            continue  # it comes as a wheel
        found = metadata.distribution(requirement.name)
        yield found
        for wanted in requirement.extras or {""}:
            yield from _needed(found.metadata["Name"], wanted)


@cache
def _needed(name: str, extra: str) -> tuple[metadata.Distribution, ...]:
    return tuple(needed(metadata.requires(name) or (), extra))


def link(distribution: metadata.Distribution, place: Path) -> None:
    """Link the top-level entries of `distribution` in site-packages into `place`."""
    for name in {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}:
        if not (place / name).exists():
            (place / name).symlink_to(distribution.locate_file(name))


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory) -> Path:
    """The `bin` of an environment with `rlframework-core[dtensor]` in it."""
    home = tmp_path_factory.mktemp("empty")
    venv.create(home)  # without pip: ours installs into it
    own = [wheels[name] for name in FIRST_RUN]
    run(*pip_for(home), "install", "--quiet", "--no-deps", "--no-index", *own, cwd=home)
    place = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    for info in place.glob("rlframework*.dist-info"):
        for distribution in needed(metadata.PathDistribution(info).requires or (), "dtensor"):
            link(distribution, place)
    return home / "bin"


@pytest.mark.parametrize("distribution", SOURCES)
def test_a_wheel_holds_its_package_and_nothing_else(wheels, distribution):
    package = distribution.replace("-core", "").replace("-", "_")
    with zipfile.ZipFile(wheels[distribution]) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    roots = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert roots == {package}
    assert f"{package}/py.typed" in names
    sources = {str(path.relative_to(SOURCES[distribution])) for path in (SOURCES[distribution] / package).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    texts = {str(path.relative_to(SOURCES[distribution])) for path in (SOURCES[distribution] / package).rglob("*.txt")}
    assert texts <= set(names)  # the template of `rlframework new-backend`
    assert set(wheels) == set(SOURCES)
    assert "Classifier: Private :: Do Not Upload" in metadata
    assert "License-Expression: Apache-2.0" in metadata


def test_core_and_dtensor_work_without_the_other_plugins(installed, tmp_path):
    rows = json.loads(run(installed / "rlframework", "plugins", "--json", cwd=tmp_path))
    assert {row["status"] for row in rows} == {"active"}
    assert {row["distribution"] for row in rows} == set(FIRST_RUN)
    [backend] = [row for row in rows if row["kind"] == "policy_worker"]
    assert backend["name"] == "dtensor"
    assert backend["version"] == next(row["version"] for row in rows if row["distribution"] == "rlframework-core")
    assert "data_parallel" in backend["capabilities"]
    assert {row["name"] for row in rows if row["kind"] == "worker_group"} == {"inline", "processes"}
    others = ("rlframework_deepspeed", "rlframework_ray", "rlframework_conformance", "deepspeed", "ray", "megatron")
    code = f"from importlib.util import find_spec\nprint([name for name in {others} if find_spec(name)])"
    assert run(installed / "python", "-c", code, cwd=tmp_path).strip() == "[]"


def test_the_extra_brought_the_plugin_of_this_repository(installed, tmp_path):
    """And not one of the same name and version from an index."""
    where = run(installed / "python", "-c", "import rlframework_dtensor as p; print(p.__path__[0])", cwd=tmp_path)
    source = SOURCES["rlframework-dtensor"] / "rlframework_dtensor"
    for path in source.rglob("*.py"):
        assert (Path(where.strip()) / path.relative_to(source)).read_bytes() == path.read_bytes()


@pytest.mark.thorough
def test_everything_in_the_installed_packages_can_be_imported(installed, tmp_path):
    packages = [name.replace("-core", "").replace("-", "_") for name in FIRST_RUN]
    code = (
        "import importlib, pkgutil\n"
        f"for package in map(importlib.import_module, {packages}):\n"
        "    assert 'site-packages' in package.__file__, package.__file__\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
    )
    run(installed / "python", "-c", code, cwd=tmp_path, minutes=3)
    run(*pip_for(installed.parent), "check", cwd=tmp_path)


@pytest.mark.thorough
def test_a_wheelhouse_is_enough_without_an_index(wheels, installed, tmp_path):
    """As on the page Install; what our distributions need from elsewhere is there already."""
    links = wheels["rlframework-core"].parent
    words = ("install", "--dry-run", "--no-index", "--find-links", links, "rlframework-core[dtensor,vllm]")
    printed = run(*pip_for(installed.parent), *words, cwd=tmp_path)
    assert re.search(r"^Would install rlframework-vllm-[\d.]+$", printed, re.MULTILINE), printed
