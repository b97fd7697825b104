"""What a mutant is: a part that is broken on purpose, in one way, and the tests that must notice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlframework.conformance.layouts import Layout
from rlframework.plugins.types import Record


@dataclass(frozen=True)
class Mutant:
    """`break_it(part_class)` gives the broken class; `tests` are the suite's tests that must fail on it.

    `name` is a word for the bug, `bug` says what it is in a sentence, as one would in a changelog. `layout` is where
    it shows. `break_record` is for what is wrong on the record rather than in the class.
    """

    name: str
    bug: str
    tests: tuple[str, ...]
    break_it: Callable[[Any], Any]
    layout: Layout = field(default_factory=Layout)
    break_record: Callable[[Record], Record] = lambda record: record
    applies: Callable[[Mapping[str, Any]], bool] = lambda section: True
    """Whether it breaks anything in a part with this section, such as one without files."""


def mutant(name: str, bug: str, *tests: str, layout: Layout | None = None) -> Callable[[Callable[[Any], Any]], Mutant]:
    """The same as a decorator of `break_it`."""
    return lambda break_it: Mutant(name, bug, tests, break_it, layout or Layout())
