"""`mutants.md`: every mutant, what is wrong with it, and which tests kill it."""

from __future__ import annotations

from collections.abc import Sequence

from pieces import page as page_of
from pieces import table

from rlframework.conformance import suite_of
from rlframework.conformance.layouts import Layout
from rlframework.conformance.mutants import Mutant, mutants_of

KINDS = ("policy_worker", "data_processor", "worker_group", "generation_engine", "environment")
_TEXT = """A mutant is a part that is broken on purpose, in one way, from bugs that this field really has. Each names
the tests of its suite that must fail on it, and each test of a suite is named by one at least;
[conformance](conformance.md#the-proof-of-the-suite) says how that is proven. `rlframework conformance PART --mutants`
repeats the proof on a part, where it declares what a mutant and a test need. Where a bug shows on several workers only,
the layout stands behind its name."""


def page() -> str:
    """The page."""
    kinds = {kind: list(mutants_of(kind).values()) for kind in KINDS}
    rows = [
        (f"[{kind}](#{kind})", str(len(found)), str(len(suite_of(kind).tests())), f"`{suite_of(kind).__name__}`")
        for kind, found in kinds.items()
    ]
    rows.append(
        ("all", str(sum(map(len, kinds.values()))), str(sum(len(suite_of(kind).tests()) for kind in kinds)), "")
    )
    parts = [part for kind, found in kinds.items() for part in (f"## {kind}", _rows(found))]
    return page_of(
        "# The mutants", _TEXT, table(("kind of part", "mutants", "tests of the suite", "suite"), rows), *parts
    )


def _rows(mutants: Sequence[Mutant]) -> str:
    rows = [(_name(found), _safe(found.bug), ", ".join(f"`{test}`" for test in found.tests)) for found in mutants]
    return table(("mutant", "what is wrong", "killed by"), rows)


def _name(mutant: Mutant) -> str:
    where = "" if mutant.layout == Layout() else f", at `{mutant.layout}`"
    return f"`{mutant.name}`{where}"


def _safe(text: str) -> str:
    """As text: `<` begins no tag, `*` and `_` no emphasis."""
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
