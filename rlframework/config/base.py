"""The base class of every configuration model: unknown keys are errors, instances are frozen."""

import sys
from collections.abc import Callable
from functools import reduce
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of the configuration. Plugins derive their sections from this class."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )


def import_path(function: Callable[..., Any]) -> str:
    """Return the import path `module:name` of `function`. Raises `ValueError` if importing it gives another object."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found: Any = reduce(
        lambda holder, part: getattr(holder, part, None), str(name).split("."), sys.modules.get(str(module))
    )
    if found is not function:
        raise ValueError(
            f"{name or type(function).__name__} has no import path; define a function at the top level of a module or "
            "of the program (no lambda, no function inside another)"
        )
    return f"{module}:{name}"
