"""docs/public.md: what it calls public exists, and names that are exported can be imported."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path

import pytest

from rlframework.base import logs, moved

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "public.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`rlframework[^|]*`) \| ([^|]+) \|", PAGE, re.MULTILINE)
PACKAGES = {name: text for names, text in ROWS for name in re.findall(r"`(rlframework[a-z_.]*)`", names)}


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_public_can_be_imported(name: str) -> None:
    module = import_module(name)
    assert module.__name__ == name  # not a name that has moved
    assert moved.new_name(name) is None
    if "`__all__`" in PACKAGES[name]:
        assert [each for each in module.__all__ if not hasattr(module, each)] == []


def test_the_packages_of_authors_are_on_the_page() -> None:
    assert {"rlframework", "rlframework.interfaces", "rlframework.engine", "rlframework.generation.sdk"} <= set(
        PACKAGES
    )
    assert logs.LEVEL_VARIABLE in PAGE


def test_files_that_the_page_names_exist() -> None:
    paths = set(re.findall(r"`([a-z_]+/[a-z_/.]+)`", PAGE))
    assert "rlframework/base/moved.py" in paths
    assert [path for path in paths if not os.path.exists(ROOT / path)] == []
