"""The pages of the names that backends and generation engines import, against the modules that export them."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import pytest
import sdk_pages


@pytest.mark.parametrize("name", ["rlframework.engine", "rlframework.generation.sdk"])
def test_each_exported_name_is_a_row_below_its_module_and_has_a_meaning(name):
    sdk, module, rows = importlib.import_module(name), "", []
    for cell, meaning in sdk_pages.rows(sdk):
        assert meaning, cell
        if cell.startswith("**"):
            module = cell.strip("*`")
            continue
        exported = re.match(r"`(\w+)", cell)[1]
        rows.append(exported)
        value = getattr(sdk, exported)
        source = importlib.import_module(module)
        assert value is (source if isinstance(value, ModuleType) else getattr(source, exported))
    assert sorted(rows) == sorted(sdk.__all__)


def test_a_constant_is_listed_where_it_is_assigned_and_not_where_it_is_imported():
    sdk = importlib.import_module("rlframework.engine")
    importlib.import_module("rlframework.policy.checkpoint_io")  # imports FIRST
    assert sdk_pages.defining_module(sdk, "FIRST") == "rlframework.policy.checkpoint.saved"
    assert sdk_pages.defining_module(sdk, "Engine") == "rlframework.policy.engine"
    assert sdk_pages.defining_module(sdk, "process_groups") == "rlframework.workers.process_groups"
