"""Packages whose names are imported on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PACKAGES = ("rlframework.algorithms.losses", "rlframework.engine", "rlframework.generation.sdk")


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> Any:
    return import_module(request.param)


def typed_imports(package: ModuleType) -> dict[str, str]:
    """The names that the package imports for type checkers, with the modules that they are imported from."""
    assert package.__file__ is not None
    tree = ast.parse(Path(package.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_each_name_is_what_type_checkers_see(package: Any) -> None:
    for name, module in typed_imports(package).items():
        source = import_module(module)
        wanted = getattr(source, name) if hasattr(source, name) else import_module(f"{module}.{name}")
        assert getattr(package, name) is wanted
    assert set(package.__all__) <= set(dir(package))


def test_an_unknown_name_is_an_attribute_error(package: Any) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'unknown'"):
        package.unknown  # noqa: B018


def test_a_name_imports_its_own_module_alone() -> None:
    code = (
        "import sys; from rlframework.engine import is_adapter; print(*(m for m in sys.modules if 'rlframework.' in m))"
    )
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "rlframework.policy.lora_math" in loaded
    assert not {"rlframework.policy.worker", "rlframework.models.loading"} & set(loaded)
