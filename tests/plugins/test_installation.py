"""Satellites that are of another version than core, or installed twice: named with a remedy, and core works on."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from rlframework.base.errors import PluginError
from rlframework.plugins.manager import create_manager

CORE = metadata.version("rlframework-core")


def fault_of(name: str) -> str:
    """The error of the backend `name`; core's own parts work."""
    manager = create_manager()
    assert manager.select("worker_group", "inline").distribution == "rlframework-core"
    with pytest.raises(PluginError) as caught:
        manager.select("policy_worker", name)
    return str(caught.value)


@pytest.mark.parametrize(
    "requirement", ["rlframework-core==99.0", "RLFramework_Core[ray]<0.1", "rlframework.core (>=99)"]
)
def test_a_satellite_of_another_version_is_not_imported_and_says_what_to_install(install, requirement):
    module = install("acme-engine", "acme", version="99.0", requires=["torch", requirement])
    message = fault_of("acme")
    assert module not in sys.modules
    assert message.startswith("policy.backend: the plugin 'acme' of acme-engine 99.0 is broken: ")
    assert f"but rlframework-core {CORE} is installed" in message
    assert "pip install --upgrade rlframework-core acme-engine." in message
    assert "or disable it: RLFRAMEWORK_DISABLE_PLUGINS=acme." in message


@pytest.mark.parametrize(
    "requirement",
    [f"rlframework-core=={CORE}", "rlframework-core[all]>=0.0.1,<9", "rlframework-core==99.0; extra == 'new'",
     "rlframework-core==99.0; python_version < '3'", "rlframework-core-extras==99.0"],
)  # fmt: skip
def test_requirements_that_are_met_or_of_something_else_are_no_fault(install, requirement):
    install("acme-engine", "acme", requires=[requirement])
    assert create_manager().select("policy_worker", "acme").version == "1.0"


def test_a_requirement_that_cannot_be_read_breaks_its_plugin_alone(install):
    install("acme-engine", "acme", requires=["rlframework-core >>= 3"])
    assert "acme-engine 1.0 requires 'rlframework-core >>= 3', which is no requirement;" in fault_of("acme")


def test_a_distribution_that_is_installed_twice_says_which_versions_and_where(install, tmp_path):
    install("acme-engine", "acme", version="2.0")
    module = install("acme-engine", "acme", version="3.0")
    message = fault_of("acme")
    assert module not in sys.modules
    assert f"acme-engine is installed 2 times in {(tmp_path / 'site').resolve()}: 2.0 and 3.0;" in message
    assert "run `pip uninstall acme-engine` until none is left, and install one." in message
    [row] = [row for row in create_manager().listing() if row.distribution == "acme-engine"]
    assert row.status == "broken"


def test_a_folder_that_comes_first_hides_a_later_one_and_may_be_named_twice(install, tmp_path, monkeypatch):
    install("acme-engine", "acme", version="2.0")
    later = tmp_path / "later" / "acme_engine-1.0.dist-info"
    later.mkdir(parents=True)
    (later / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-engine\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(later.parent), sys.path[0]])
    assert create_manager().select("policy_worker", "acme").version == "2.0"


def test_a_disabled_satellite_of_another_version_is_disabled_and_not_broken(install):
    install("acme-engine", "acme", requires=["rlframework-core==99.0"])
    [row] = [row for row in create_manager(disabled=["acme"]).listing() if row.name == "acme"]
    assert row.status == "disabled"
