"""Names of a package that are imported on first use, as PEP 562 allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of `package`; `modules` maps each name to the module that defines it.

    A name that is a module itself is mapped to its full name, such as `{"adapters": "rlframework.models.adapters"}`.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(modules[name])
        is_module = modules[name].endswith(f".{name}") and not hasattr(module, name)
        return module if is_module else getattr(module, name)

    return get, lambda: sorted(modules)
