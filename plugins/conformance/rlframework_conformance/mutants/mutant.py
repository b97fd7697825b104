"""`Mutant`: a deliberately broken part with one bug, and the tests that must detect it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
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


def around(*methods: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[[Any], Any]]:
    """Decorate `change(call, part, ...)`, which runs in place of each of `methods` and gets its arguments.

    `call` is the sound method, bound to `part`:

        @mutant("shuffled_each_time", "Each call returns the samples in another order.", ORDER)
        @around(Environment.samples)
        def _shuffled_each_time(call, environment, split):
            return random.sample(call(split), len(call(split)))
    """

    def decorate(change: Callable[..., Any]) -> Callable[[Any], Any]:
        def break_it(part: Any) -> Any:
            return type(part)(
                f"Broken{part.__name__}", (part,), {m.__name__: _override(part, m, change) for m in methods}
            )

        return break_it

    return decorate


def _override(part: Any, method: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `change` with the method of `part`."""

    @wraps(method)
    def run(self: Any, *args: Any, **keywords: Any) -> Any:
        return change(getattr(part, method.__name__).__get__(self), self, *args, **keywords)

    return run
