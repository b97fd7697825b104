"""Checks of plugins: which are found, why one cannot be used, and known failures of the backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlframework.doctor.context import Context
from rlframework.doctor.findings import Finding, note, ok
from rlframework.doctor.registry import check
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
    yield ok(
        "; ".join(f"{kind}: {', '.join(sorted(names))}" for kind, names in sorted(kinds.items())), parts=dict(kinds)
    )
    for row in rows:
        if row.status == "disabled":
            yield note(f"{_title(row)} is disabled: {row.reason}")
        elif row.status == "broken":
            remedy = f"Reinstall {row.distribution}, or disable it: RLFRAMEWORK_DISABLE_PLUGINS={row.name}"
            yield context.problem(
                f"{_title(row)} is broken: {row.reason}", remedy, needed=_is_chosen(context, row.name)
            )


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


def _is_chosen(context: Context, name: str) -> bool:
    """Whether the configuration selects the plugin (rarely a broken one, as the configuration would not load)."""
    config = context.config
    if config is None:
        return True
    sections = (config.algorithm, config.environment, config.generation, config.worker_group)
    return name == config.policy.backend or name in [section.name for section in sections]
