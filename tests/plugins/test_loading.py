"""Import paths."""

from __future__ import annotations

import collections

import pytest

from rlframework.errors import PluginError
from rlframework.plugins.loading import load_target


def test_an_import_path_is_a_module_and_a_name_in_it() -> None:
    assert load_target("collections:OrderedDict") is collections.OrderedDict
    assert load_target("collections:OrderedDict.fromkeys") == collections.OrderedDict.fromkeys


@pytest.mark.parametrize("target", ["collections", "collections:", ":OrderedDict", ""])
def test_what_is_no_import_path_is_told(target: str) -> None:
    with pytest.raises(PluginError, match="is not an import path: write module:Name"):
        load_target(target)


def test_a_name_that_is_not_there_is_told() -> None:
    with pytest.raises(PluginError, match="module 'collections' has no 'Ordered'; check the target of the plugin"):
        load_target("collections:Ordered")


def test_a_module_that_cannot_be_imported_raises_its_own_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module_here"):
        load_target("no_such_module_here:Name")
