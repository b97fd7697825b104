"""Which layouts a run takes: from words of the command line, among those that a record can have."""

from __future__ import annotations

from collections.abc import Sequence

from rlframework.conformance.layouts import Layout, declared_layouts, quick_layouts
from rlframework.errors import ConfigError
from rlframework.plugins.types import Capability, Record

_NEEDED = {
    "data": Capability.DATA_PARALLEL,
    "tensor": Capability.TENSOR_PARALLEL,
    "context": Capability.CONTEXT_PARALLEL,
    "pipeline": Capability.PIPELINE_PARALLEL,
    "expert": Capability.EXPERT_PARALLEL,
}


def layouts_of(record: Record, words: Sequence[str] | None) -> list[Layout]:
    """`quick` (also for None), `all`, or layouts as text; a `ConfigError` for one that `record` does not declare."""
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
    needed = {capability for axis, capability in _NEEDED.items() if getattr(layout, axis) > 1}
    if layout.sequence:
        needed.add(Capability.SEQUENCE_PARALLEL)
    if missing := sorted(needed - record.capabilities):
        known = ", ".join(f"'{layout}'" for layout in declared_layouts(record))
        raise ConfigError(
            f"layout {word!r}: {record.name!r} does not declare {', '.join(missing)}; layouts that it does: {known}"
        )
    return layout
