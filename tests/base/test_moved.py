"""Old import paths: each leads to the same objects as the new one, with a warning."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from rlframework.base.moved import MOVED, new_name


@pytest.fixture(autouse=True)
def _old_modules_are_forgotten(monkeypatch):
    """So that each test imports them again, with the warning."""
    for name in [name for name in sys.modules if new_name(name)]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_warns_and_has_the_names_of_the_new_one(old):
    with pytest.warns(DeprecationWarning, match="has moved to") as caught:
        module = import_module(old)
    assert f"{old} has moved to {MOVED[old]}; " in str(caught[-1].message)
    assert set(dir(import_module(MOVED[old]))) <= set(dir(module))


def test_modules_inside_a_package_that_moved_follow_it():
    with pytest.warns(DeprecationWarning, match="has moved to"):
        old = import_module("rlframework.conformance.layouts")
    assert old.Layout is import_module("rlframework_conformance.layouts").Layout
    with pytest.raises(ImportError):
        import_module("rlframework.conformance.no_such_module")


def test_a_new_package_that_is_not_installed_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(MOVED, "rlframework.old_satellite", "rlframework_nowhere")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'rlframework-core\[nowhere\]'"):
        import_module("rlframework.old_satellite")


def test_names_of_generation_on_workers_are_found_where_they_were() -> None:
    from rlframework.generation import driver, remote

    with pytest.warns(DeprecationWarning, match=r"driver\.RemoteGeneration is now rlframework\.generation\.remote\."):
        assert driver.RemoteGeneration is remote.RemoteGeneration
    with pytest.raises(AttributeError, match="unknown"):
        driver.unknown  # noqa: B018
