"""Generate `mutants.md`: every mutant, its bug, and the tests that detect it."""

from __future__ import annotations

from collections.abc import Sequence

from pieces import page as page_of
from pieces import table

from rlframework_conformance import suite_of
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants import Mutant, mutants_of
from rlframework_conformance.mutants.matrix import Matrix, stored

KINDS = ("policy_worker", "data_processor", "worker_group", "generation_engine", "environment")
_TEXT = """A mutant is a part that is broken on purpose: one bug that occurs in real training stacks. Each mutant
is caught by a test of its suite, and each test catches a mutant;
[conformance](conformance.md#the-proof-of-the-suite) describes how this is verified. To repeat the proof for a part, run
`rlframework conformance PART --mutants`; it covers the mutants and tests whose requirements the part declares. A bug
that shows only on several workers has its layout after its name."""


def page() -> str:
    """Return the text of the page."""
    kinds = {kind: list(mutants_of(kind).values()) for kind in KINDS}
    rows = [
        (f"[{kind}](#{kind})", str(len(found)), str(len(suite_of(kind).tests())), f"`{suite_of(kind).__name__}`")
        for kind, found in kinds.items()
    ]
    rows.append(
        ("all", str(sum(map(len, kinds.values()))), str(sum(len(suite_of(kind).tests()) for kind in kinds)), "")
    )
    parts = [part for kind, found in kinds.items() for part in (f"## {kind}", _rows(found, stored(kind)))]
    return page_of(
        "# The mutants", _TEXT, table(("kind of part", "mutants", "tests of the suite", "suite"), rows), *parts
    )


def _rows(mutants: Sequence[Mutant], tests: Matrix) -> str:
    rows = [(_name(one), _escaped(one.bug), ", ".join(f"`{test}`" for test in tests[one.name])) for one in mutants]
    return table(("mutant", "bug", "detected by"), rows)


def _name(mutant: Mutant) -> str:
    where = "" if mutant.layout == Layout() else f", at `{mutant.layout}`"
    return f"`{mutant.name}`{where}"


def _escaped(text: str) -> str:
    """`text` as Markdown without tags or emphasis; code spans stay as they are."""
    spans = text.split("`")
    spans[::2] = [span.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_") for span in spans[::2]]
    return "`".join(spans)
