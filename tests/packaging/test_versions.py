"""One release, said in many files: versions, pins, extras, entry points, requirements, constraints, all in step.

The version of a distribution is written once, in the `__init__.py` of its package.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from rlframework_tools.new_backend import core_range

ROOT = Path(__file__).parents[2]
PLUGINS = tuple(sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")))
FOLDERS = {"core": ROOT, **{name: ROOT / "plugins" / name for name in PLUGINS}}
PACKAGES = {"core": "rlframework", **{name: f"rlframework_{name}" for name in PLUGINS}}


def project(name: str) -> dict:
    return tomllib.loads((FOLDERS[name] / "pyproject.toml").read_text())


def version(name: str) -> str:
    """The literal `__version__` of a package, read without importing it."""
    tree = ast.parse((FOLDERS[name] / PACKAGES[name] / "__init__.py").read_text())
    found = [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and [getattr(target, "id", "") for target in node.targets] == ["__version__"]
    ]
    assert len(found) == 1, f"{PACKAGES[name]} must have one literal __version__"
    return found[0]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_distribution_has_our_name_licence_and_one_typed_package(name):
    table, hatch = project(name)["project"], project(name)["tool"]["hatch"]
    assert table["name"] == f"rlframework-{name}"
    assert ("version" in table, table["dynamic"]) == (False, ["version"])
    assert hatch["version"]["path"] == f"{PACKAGES[name]}/__init__.py"
    assert (table["license"], table["requires-python"]) == ("Apache-2.0", ">=3.11")
    assert "Private :: Do Not Upload" in table["classifiers"]
    assert (FOLDERS[name] / PACKAGES[name] / "py.typed").is_file()
    assert hatch["build"]["targets"]["wheel"]["packages"] == [PACKAGES[name]]


@pytest.mark.parametrize("name", PLUGINS)
def test_each_plugin_pins_its_release_and_has_one_entry_point_with_a_light_module(name):
    dependencies = project(name)["project"]["dependencies"]
    pins = {item for item in dependencies if Requirement(item).name.startswith("rlframework")}
    also = {"conformance": {f"rlframework-transformers=={version('core')}"}}  # the engine of the workers it tests
    assert pins == {f"rlframework-core=={version('core')}"} | also.get(name, set())
    groups = dict(project(name)["project"]["entry-points"])
    if name == "conformance":
        assert groups.pop("pytest11") == {"rlframework": "rlframework_conformance.pytest_plugin"}
    assert groups == {"rlframework": {name: f"{PACKAGES[name]}.plugin"}}
    assert (FOLDERS[name] / PACKAGES[name] / "plugin.py").is_file()


OPTIONAL = (
    *("wandb", "mlflow", "trackio", "gymnasium", "mcp", "openenv", "reasoning-gym", "verifiers"),
    *("judge", "vision"),
)
"""The extras of packages that one part each needs."""

FIRST_RUN = ("dtensor", "transformers", "preferences", "distillation", "report", "tools")

ALIASES = (
    *("agent", "doctor", "init", "new-backend", "parity"),
    *("agent-endpoint", "teacher-endpoint", "uploads", "plan-elsewhere"),
    *("dpo", "ipo", "kto", "orpo", "simpo", "reward-model", "process-reward-model"),
)
"""The extras of a part, a command or a hook of a distribution with another name."""


def test_the_extras_pin_the_plugins_and_all_names_them_all():
    extras = project("core")["project"]["optional-dependencies"]
    assert set(extras) == {*PLUGINS, *OPTIONAL, *ALIASES, "all", "dev", "docs"}
    for name in PLUGINS:
        assert f"rlframework-{name}=={version(name)}" in extras[name]
    everything = [Requirement(item) for item in extras["all"]]
    assert {item.name for item in everything} == {"rlframework-core"}
    assert {extra for item in everything for extra in item.extras} == set(extras) - {"all", "dev", "docs"}


def test_the_first_run_is_what_the_reference_backend_brings():
    extras = project("core")["project"]["optional-dependencies"]
    assert extras["dtensor"] == [f"rlframework-{name}=={version(name)}" for name in FIRST_RUN]
    folders = " ".join(f"-e plugins/{name}" for name in FIRST_RUN)
    assert f"install -e . {folders}\n" in (ROOT / "Makefile").read_text()


def test_core_depends_on_no_plugin():
    names = {Requirement(item).name for item in project("core")["project"]["dependencies"]}
    assert not {name for name in names if name.startswith("rlframework")}
    assert not names & {"deepspeed", "megatron-core"}


def test_the_script_is_there():
    assert project("core")["project"]["scripts"] == {"rlframework": "rlframework.cli:main"}
    assert callable(importlib.import_module("rlframework.cli").main)


def test_the_developers_requirements_have_one_line_for_each_distribution():
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    own = [f"-e .[dev,docs,{','.join(OPTIONAL)}]", "-e examples/ddp_backend"]
    assert sorted(wanted) == sorted([*own, *(f"-e plugins/{name}" for name in PLUGINS)])


def test_the_example_of_a_backend_takes_this_core_and_the_next_ones_that_do_not_break_it():
    table = tomllib.loads((ROOT / "examples/ddp_backend/pyproject.toml").read_text())["project"]
    [core] = map(Requirement, table["dependencies"])
    assert core.name == "rlframework-core"
    assert core.specifier.contains(version("core"))
    assert not core.specifier.contains("1.0")


@pytest.mark.parametrize("page", ["plugins", "write_a_backend"])
def test_a_page_for_plugin_authors_names_the_range_that_new_backend_writes(page):
    wanted = f"rlframework-core{core_range(version('core'))}"
    named = re.findall(r"rlframework-core[<>=~!][^\"`\s]*", (ROOT / "docs" / f"{page}.md").read_text())
    assert named
    assert set(named) == {wanted}


def test_the_changelog_has_this_release():
    assert f"## {version('core')}" in (ROOT / "CHANGELOG.md").read_text()


EXACT = re.compile(r"([a-z0-9-]+)==([0-9][A-Za-z0-9.!]*)")


def versions(name: str) -> dict[str, str]:
    """The constraints of a file by name; each line is a comment, or one exact version without local part or path."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    matches = [EXACT.fullmatch(line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if not match]
    return {match[1]: match[2] for match in matches if match}


def requirements() -> list[Requirement]:
    """All requirements of core and its plugins, extras too, without those on each other."""
    lists = []
    for path in [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]:
        project = tomllib.loads(path.read_text())["project"]
        lists += [project.get("dependencies", []), *project.get("optional-dependencies", {}).values()]
    found = [Requirement(text) for each in lists for text in each]
    return [each for each in found if not each.name.startswith("rlframework")]


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-lowest.txt"])
def test_every_version_is_within_the_bounds_of_the_requirements(name: str) -> None:
    pinned = versions(name)
    used = [each for each in requirements() if canonicalize_name(each.name) in pinned]
    assert used
    outside = [
        f"{each}: {pinned[canonicalize_name(each.name)]}"
        for each in used
        if not each.specifier.contains(pinned[canonicalize_name(each.name)], prereleases=True)
    ]
    assert outside == []


def test_what_core_requires_has_a_version_and_our_distributions_have_none() -> None:
    pinned = versions("constraints.txt")
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {canonicalize_name(Requirement(text).name) for text in core} <= set(pinned)
    assert not [name for name in pinned if name.startswith("rlframework")]


def test_the_lowest_versions_are_the_lower_bounds() -> None:
    lowest = versions("constraints-lowest.txt")
    core = [
        Requirement(text) for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ]
    bounds = {each.name: Version(spec.version) for each in core for spec in each.specifier if spec.operator == ">="}
    assert set(lowest) == {"torch", "transformers"}
    assert {name: Version(version) for name, version in lowest.items()} == {name: bounds[name] for name in lowest}


class Installed:
    """A distribution as `importlib.metadata` describes it."""

    def __init__(self, name: str, version: str, direct_url: str | None = None) -> None:
        self.name, self.version, self._direct_url = name, version, direct_url

    def read_text(self, name: str) -> str | None:
        return self._direct_url if name == "direct_url.json" else None


def test_folders_local_parts_and_pip_are_left_out_of_the_file() -> None:
    constraints = runpy.run_path(str(ROOT / "tools" / "constraints.py"))["constraints"]
    assert constraints(
        [
            Installed("torch", "2.13.0+cpu"),
            Installed("ours", "1.0", '{"url": "file:///home/me/ours", "dir_info": {"editable": true}}'),
            Installed("Flask_Cors", "5.0", '{"url": "file:///wheels/flask_cors.whl", "archive_info": {}}'),
            Installed("flask-cors", "4.0"),  # behind the other one on the path
            Installed("pip", "25.0"),
        ]
    ) == ["flask-cors==5.0", "torch==2.13.0"]
