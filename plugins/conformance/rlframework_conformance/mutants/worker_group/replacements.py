"""Helpers that break a worker group in one line, by replacing a method or changing the keywords of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlframework_conformance.layouts import Layout

Break = Callable[[type], type]
TWO = Layout(data=2)


def with_methods(part: type, **methods: Any) -> type:
    """Return a subclass of `part` with `methods` replaced."""
    return type(part)(f"Broken{part.__name__}", (part,), methods)


def starting(change: Callable[..., tuple[Any, Any]]) -> Break:
    """Break the start: the group is created from `change(spec, config)`."""

    def break_it(part: Any) -> type:
        def init(self: Any, spec: Any, config: Any, **given: Any) -> None:
            part.__init__(self, *change(spec, config), **given)

        return with_methods(part, __init__=init)

    return break_it


def values(change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that applies `change` to the value of each keyword."""
    return lambda given: {name: change(value) for name, value in given.items()}


def without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that drops the keywords in `names`."""
    return lambda given: {name: value for name, value in given.items() if name not in names}
