"""What breaks worker groups with one line: a sound class with another method, or with changed keywords of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlframework.conformance.layouts import Layout

Break = Callable[[type], type]
TWO = Layout(data=2)


def with_methods(part: type, **methods: Any) -> type:
    """`part` with other methods."""
    return type(part)(f"Broken{part.__name__}", (part,), methods)


def starting(change: Callable[..., tuple[Any, Any]]) -> Break:
    """It is started with what `change(spec, config)` gives."""

    def break_it(part: Any) -> type:
        def init(self: Any, spec: Any, config: Any, **given: Any) -> None:
            part.__init__(self, *change(spec, config), **given)

        return with_methods(part, __init__=init)

    return break_it


def values(change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Keywords whose values are changed, one by one."""
    return lambda given: {name: change(value) for name, value in given.items()}


def without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Keywords without those of `names`."""
    return lambda given: {name: value for name, value in given.items() if name not in names}
