"""One release, said in many files: versions, pins, extras, entry points, requirements, all in step.

The version of a distribution is written once, in the `__init__.py` of its package.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlframework_tools.new_backend import core_range

ROOT = Path(__file__).parents[2]
PLUGINS = (
    "preferences",
    "distillation",
    "report",
    "tools",
    "conformance",
    "storage",
    "environments",
    "serve",
    "transformers",
    "ray",
    "deepspeed",
    "dtensor",
    "megatron",
    "vllm",
)
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


def test_every_plugin_folder_is_known_here():
    assert {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")} == set(PLUGINS)


@pytest.mark.parametrize("name", FOLDERS)
def test_name_version_licence_and_classifier(name):
    table = project(name)["project"]
    assert table["name"] == f"rlframework-{name}"
    assert "version" not in table
    assert table["dynamic"] == ["version"]
    assert project(name)["tool"]["hatch"]["version"]["path"] == f"{PACKAGES[name]}/__init__.py"
    assert table["license"] == "Apache-2.0"
    assert table["requires-python"] == ">=3.11"
    assert "Private :: Do Not Upload" in table["classifiers"]


@pytest.mark.parametrize("name", FOLDERS)
def test_the_package_is_typed_and_alone_in_its_wheel(name):
    assert (FOLDERS[name] / PACKAGES[name] / "py.typed").is_file()
    assert project(name)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [PACKAGES[name]]


@pytest.mark.parametrize("name", PLUGINS)
def test_each_plugin_pins_the_distributions_of_its_release(name):
    pins = {
        item for item in project(name)["project"]["dependencies"] if Requirement(item).name.startswith("rlframework")
    }
    also = {"conformance": {f"rlframework-transformers=={version('core')}"}}  # the engine of the workers it tests
    assert pins == {f"rlframework-core=={version('core')}"} | also.get(name, set())


OPTIONAL = (
    "wandb",
    "mlflow",
    "trackio",
    "gymnasium",
    "mcp",
    "openenv",
    "reasoning-gym",
    "verifiers",
    "judge",
    "vision",
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


def test_the_extra_of_the_reference_backend_brings_what_the_first_run_needs():
    extras = project("core")["project"]["optional-dependencies"]
    assert extras["dtensor"] == [f"rlframework-{name}=={version(name)}" for name in FIRST_RUN]


def test_core_depends_on_no_plugin():
    names = {Requirement(item).name for item in project("core")["project"]["dependencies"]}
    assert not {name for name in names if name.startswith("rlframework")}
    assert not names & {"deepspeed", "megatron-core"}


@pytest.mark.parametrize("name", PLUGINS)
def test_each_plugin_has_one_entry_point_with_a_light_module(name):
    groups = dict(project(name)["project"]["entry-points"])
    if name == "conformance":
        assert groups.pop("pytest11") == {"rlframework": "rlframework_conformance.pytest_plugin"}
    assert groups == {"rlframework": {name: f"{PACKAGES[name]}.plugin"}}
    assert (FOLDERS[name] / PACKAGES[name] / "plugin.py").is_file()


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


def test_the_quickstart_installs_core_and_the_reference_backend():
    folders = " ".join(f"-e plugins/{name}" for name in FIRST_RUN)
    assert f"install -e . {folders}\n" in (ROOT / "Makefile").read_text()


def test_the_changelog_has_this_release():
    assert f"## {version('core')}" in (ROOT / "CHANGELOG.md").read_text()
