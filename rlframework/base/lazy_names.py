"""Names of a package that are imported on first use, as PEP 562 allows."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(
    package: str, file: str, *others: str
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of `package`, whose source is `file`.

    The names are those that the package imports under `if TYPE_CHECKING:`, and `others` that it defines. So they are
    written once: type checkers and import-linter read these imports, and here they are looked up instead of executed.
    """
    modules = _typed_imports(Path(file))
    names = sorted([*modules, *others])

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(modules[name])
        return getattr(module, name) if hasattr(module, name) else import_module(f"{modules[name]}.{name}")

    return names, get, lambda: names


def _typed_imports(file: Path) -> dict[str, str]:
    """Return the module of each name that `file` imports under `if TYPE_CHECKING:`."""
    blocks = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
