"""The base class of every configuration model (unknown keys are errors, instances are frozen), and marks on keys."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """One section of the configuration. Plugins derive their sections from this class."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Show the keys whose values are not the defaults."""
        defaults = vars(type(self).model_construct())
        return [(key, value) for key, value in super().__repr_args__() if key not in defaults or value != defaults[key]]


OwnPath = Annotated[str, Field(pattern=":")]
"""The import path of something of the user's, `module:name`."""


@dataclass(frozen=True)
class NeedsTrust:
    """Annotates a key that runs code or sends data elsewhere: `Annotated[bool, NeedsTrust("runs ...")]`.

    The `config.yaml` of a run, which may come from anybody, may not set it (see `rlframework.config.trust`), except to
    its default and the `harmless` values. `effect` completes "KEY=VALUE, which ...".
    """

    effect: str
    harmless: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ImportsCode:
    """Annotates a key with import paths or modules that are imported; those in a run's own folder need trust."""


def import_path(function: Callable[..., Any]) -> str:
    """Return the import path `module:name` of `function`, which may be a class.

    Raises `ValueError` if importing it gives another object.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found: Any = reduce(
        lambda holder, part: getattr(holder, part, None), str(name).split("."), sys.modules.get(str(module))
    )
    if found is not function:
        if name is None:
            kind = type(function)
            raise ValueError(
                f"an object of the class {kind.__qualname__} has no import path; give the class, "
                f"{kind.__module__}:{kind.__qualname__}, or the path module:name of a global variable with the object"
            )
        if "<" not in name and found is not None:  # as `<locals>` and `<lambda>`
            raise ValueError(
                f"{name} was defined again since; run the cell or line that makes this configuration again"
            )
        raise ValueError(
            f"{name} has no import path; define it at the top level of a module or "
            "of the program (no lambda, nothing inside a function)"
        )
    return f"{module}:{name}"


CallableAsPath = BeforeValidator(lambda value: import_path(value) if callable(value) else value)
"""Annotates a key with an import path, which may be given as the function or class itself."""
