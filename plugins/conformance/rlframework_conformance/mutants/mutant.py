"""`Mutant`: a deliberately broken part with one bug, and the tests that must detect it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlframework.plugins.types import Capability, Record
from rlframework_conformance.layouts import Layout


@dataclass(frozen=True)
class Mutant:
    """A deliberate bug. `break_it(part_class)` returns the broken class, on which the suite's `tests` must fail.

    `name` identifies the bug, and `bug` describes it in one sentence, as a changelog would. The bug shows in `layout`.
    `break_record` is for bugs in the plugin's record rather than in its class.
    """

    name: str
    bug: str
    tests: tuple[str, ...]
    break_it: Callable[[Any], Any]
    layout: Layout = field(default_factory=Layout)
    break_record: Callable[[Record], Record] = lambda record: record
    applies: Callable[[Mapping[str, Any]], bool] = lambda section: True
    """Whether the bug can occur in a part with this section. A missing file, for one, needs a part that reads files."""
    needs: frozenset[Capability] = frozenset()
    """Capabilities that the part must declare for the bug to occur, besides those of the layout and the tests."""


def mutant(
    name: str,
    bug: str,
    *tests: str,
    layout: Layout | None = None,
    break_record: Callable[[Record], Record] = lambda record: record,
    applies: Callable[[Mapping[str, Any]], bool] = lambda section: True,
    needs: frozenset[Capability] = frozenset(),
) -> Callable[[Callable[[Any], Any]], Mutant]:
    """Decorate `break_it` to make it a `Mutant`."""
    return lambda break_it: Mutant(name, bug, tests, break_it, layout or Layout(), break_record, applies, needs)
