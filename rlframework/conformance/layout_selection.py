"""Which layouts a run takes: from words of the command line, among those that a record can have and a suite can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlframework.conformance.layouts import Layout, declared_layouts, quick_layouts
from rlframework.errors import ConfigError
from rlframework.plugins.types import PolicyWorkerRecord, Record, WorkerGroupRecord

_DATA: Mapping[str, tuple[tuple[int, ...], str]] = {
    PolicyWorkerRecord.kind: ((1, 2, 4, 8), "the suite's batches have 8 rows, which each replica gets as many of"),
    WorkerGroupRecord.kind: ((1, 2), "the suite works out by hand what each of one or two workers must answer"),
}
"""Kind of record to the sizes of the data axis that its suite can do, and why no others."""


def layouts_of(record: Record, words: Sequence[str] | None) -> list[Layout]:
    """`quick` (also for None), `all`, or layouts as text.

    A `ConfigError` for a layout that `record` does not declare, and for one that the suite of its kind cannot do.
    """
    layouts: list[Layout] = []
    for word in words or ["quick"]:
        if word == "quick":
            layouts += quick_layouts(record)
        elif word == "all":
            layouts += declared_layouts(record)
        else:
            layouts.append(_declared(record, word))
    return list(dict.fromkeys(layouts))


def _declared(record: Record, word: str) -> Layout:
    layout = Layout.parse(word)
    if missing := sorted(layout.capabilities - record.capabilities):
        known = ", ".join(f"'{layout}'" for layout in declared_layouts(record))
        raise ConfigError(
            f"layout {word!r}: {record.name!r} does not declare {', '.join(missing)}; layouts that it does: {known}"
        )
    sizes, why = _DATA.get(record.kind, ((layout.data,), ""))
    if layout.data not in sizes:
        *first, last = map(str, sizes)
        raise ConfigError(f"layout {word!r}: data can be {', '.join(first)} or {last}: {why}")
    return layout
