"""Checks of plugins: which are found, why one cannot be used, and known failures of the backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlframework.doctor.checks import Context, Finding, check, note, ok
from rlframework.errors import PluginError

if TYPE_CHECKING:
    from rlframework.plugins.listing import PluginListing


@check("plugins", "found")
def found(context: Context) -> Iterator[Finding]:
    """The available plugins by kind, and those that are broken or disabled."""
    try:
        rows = context.manager.listing()
    except PluginError as error:
        yield context.problem(str(error), "See `rlframework plugins`", needed=True)
        return
    kinds: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.status == "active" and row.kind is not None:
            kinds[row.kind].append(row.name)
    text = "; ".join(f"{kind}: {', '.join(sorted(names))}" for kind, names in sorted(kinds.items()))
    yield ok(text, facts={"parts": dict(kinds)})
    for row in rows:
        if row.status == "disabled":
            yield note(f"{_title(row)} is disabled: {row.reason}")
        elif row.status == "broken":
            text = f"{_title(row)} is broken: {row.reason}"
            remedy = f"Reinstall {row.distribution}, or disable it: RLFRAMEWORK_DISABLE_PLUGINS={row.name}"
            yield context.problem(text, remedy, needed=context.config is None)  # a chosen one would not load


@check("plugins", "known failures")
def known_failures(context: Context) -> Iterator[Finding]:
    """The known failures that the selected backend declares."""
    if context.config is None:
        return
    record = context.manager.select("policy_worker", context.config.policy.backend).record
    for failure in record.known_failures:
        where = f" with {', '.join(failure.layouts)}" if failure.layouts else ""
        yield note(f"{record.name} fails the conformance test {failure.test}{where}: {failure.reason}")


def _title(row: PluginListing) -> str:
    what = f"the {row.kind} {row.name}" if row.kind is not None else f"the plugin {row.name}"
    return f"{what} ({row.distribution} {row.version})"
