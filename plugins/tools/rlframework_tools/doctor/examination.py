"""Runs the checks, also those of plugins, concurrently and independently, hides secrets in them, and renders them."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import groupby

from rich.table import Table
from rich.text import Text

from rlframework import __version__
from rlframework.base.errors import PluginError
from rlframework.base.logs import log_if_slow, printable
from rlframework.base.secrets import hide_secrets
from rlframework.config.sections import RunConfig
from rlframework.plugins.discovery import Plugin
from rlframework.plugins.hook_calls import Hook
from rlframework.plugins.hookspec import DoctorCheck, DoctorFinding
from rlframework_tools.doctor import machine, run
from rlframework_tools.doctor.checks import Check, Context, Finding, Findings, unknown
from rlframework_tools.doctor.rates import rates as engines_and_trainers


def _if_loaded(
    check: Callable[[Context, RunConfig], Iterable[DoctorFinding]],
) -> Callable[[Context], Iterable[DoctorFinding]]:
    """`check`, without findings if the configuration does not load."""
    return lambda context: check(context, context.config) if context.config is not None else ()


CHECKS = (
    Check("machine", "python", machine.python),
    Check("machine", "processor", machine.processor),
    Check("machine", "memory", machine.memory),
    Check("machine", "disk", machine.disk),
    Check("machine", "shared memory", machine.shared_memory),
    Check("machine", "open files", machine.open_files),
    Check("machine", "processes", machine.processes),
    Check("machine", "proxies", machine.proxies),
    Check("machine", "variables", machine.variables),
    Check("devices", "GPUs", machine.gpus),
    Check("devices", "torch", machine.torch),
    Check("packages", "versions", machine.versions),
    Check("packages", "requirements", machine.requirements),
    Check("packages", "compilers", machine.compilers),
    Check("plugins", "found", machine.plugins),
    Check("plugins", "generation engines", machine.generation_engines),
    Check("cluster", "ray", run.ray),
    Check("cluster", "token", run.token),
    Check("cluster", "nodes", run.nodes),
    Check("run", "configuration", run.configuration),
    Check("run", "model", _if_loaded(run.model)),
    Check("run", "estimate", _if_loaded(run.estimate)),
    Check("run", "workers", _if_loaded(run.workers)),
    Check("run", "python of the workers", _if_loaded(run.python_of_workers)),
)
"""All checks in display order. Those of the topic "run" need a configuration, and are skipped without one."""

RATES = Check("run", "engines and trainers", _if_loaded(engines_and_trainers))
"""The check that comes after all others."""

_TOGETHER = 8
_COLOURS = {"ok": "green", "note": "cyan", "unknown": "magenta", "warning": "yellow", "broken": "bold red"}
"""The colour of each level, the mildest first."""


@dataclass(frozen=True)
class Examination:
    """The findings, in the order of the checks. `of_run`: a configuration was given."""

    findings: tuple[Finding, ...]
    of_run: bool

    @property
    def exit_code(self) -> int:
        """1 if something is broken, else 0."""
        return int(any(finding.level == "broken" for finding in self.findings))

    def as_json(self) -> str:
        """Return a JSON object with `version`, `exit_code` and `findings`, a list with the fields of `Finding`."""
        found = [asdict(finding) for finding in self.findings]
        values = {"version": __version__, "exit_code": self.exit_code, "findings": found}
        return printable(json.dumps(values, indent=2, ensure_ascii=False))

    def as_table(self) -> Table:
        """Return a table with one row per finding, its remedy below its description."""
        table = Table()
        for title in ("about", "check", "state"):
            table.add_column(title, no_wrap=True)
        table.add_column("finding and remedy", overflow="fold")
        for topic, findings in groupby(self.findings, lambda finding: finding.topic):
            table.add_section()
            for finding in findings:
                text = Text(finding.text)
                if finding.remedy:
                    text.append(f"\n-> {finding.remedy}", style="bold")
                table.add_row(topic, finding.name, Text(finding.level, style=_COLOURS[finding.level]), text)
                topic = ""
        return table

    def summary(self) -> str:
        """Return the last line of the output."""
        counts: Counter[str] = Counter(finding.level for finding in self.findings)
        parts = [f"{counts[level]} {level}" for level in reversed(_COLOURS) if counts[level] and level != "note"]
        if self.exit_code:
            verdict = "this run will fail" if self.of_run else "something is broken"
        else:
            verdict = "this run can start" if self.of_run else "nothing is broken"
        return f"{verdict}: {', '.join(parts)}"


def examine(
    source: str | None = None,
    overrides: Sequence[str] = (),
    checks: Sequence[Check] | None = None,
    *,
    rates: str | None = None,
    measure: bool = False,
) -> Examination:
    """Check this machine and, if given, the run of the configuration `source`.

    `checks`: by default `CHECKS` and those of plugins, in the order of `CHECKS`' topics, new topics last.
    `rates` and `measure`: see `Context`. Output of plugins and libraries goes to stderr.
    """
    with contextlib.redirect_stdout(sys.stderr):
        context = Context(source, overrides, rates=rates, measure=measure)
        checks = _by_topic([*CHECKS, *checks_of_plugins(context)]) if checks is None else checks
        chosen = [one for one in checks if source is not None or one.topic != "run"]
        with ThreadPoolExecutor(_TOGETHER, thread_name_prefix="doctor") as pool:
            found = list(pool.map(lambda one: _findings(one, context), chosen))
        if context.config is not None:  # alone, because it measures
            found.append(_findings(RATES, context))
    return Examination(tuple(_hidden(finding) for some in found for finding in some), source is not None)


def _by_topic(checks: Sequence[Check]) -> list[Check]:
    """The checks with those of one topic together."""
    topics = list(dict.fromkeys(one.topic for one in checks))
    return sorted(checks, key=lambda one: topics.index(one.topic))


def _findings(one: Check, context: Context) -> list[Finding]:
    """The findings of one check; an exception becomes a finding."""
    try:
        found = list(map(_checked, one.function(context)))
    except Exception as error:  # noqa: BLE001 - an error in one check must not stop the others
        text = f"could not be checked: {type(error).__name__}: {error}"
        found = [unknown(text, one.remedy)]
    return [Finding(**vars(finding), topic=one.topic, name=one.name) for finding in found]


def _checked(finding: DoctorFinding) -> DoctorFinding:
    if not isinstance(finding, DoctorFinding):
        raise TypeError(f"{finding!r} is no DoctorFinding")
    if finding.level not in _COLOURS:
        raise ValueError(f"{finding.level!r} is not a valid Level")
    return finding


def _hidden(finding: Finding) -> Finding:
    texts = {"text": printable(finding.text), "remedy": printable(finding.remedy)}
    return replace(finding, **hide_secrets(texts | {"facts": finding.facts}))


def checks_of_plugins(context: Context) -> list[Check]:
    """Return the checks of all plugins, and one for each plugin whose hook fails, which says so."""
    failures: list[str] = []
    try:
        found = list(context.manager.call("rlframework_doctor_checks", _checks, failures.append))
    except PluginError:  # of the manager; the check of plugins reports it
        return []
    checks = [_as_check(plugin, check) for plugin, checks in found for check in checks]
    return [*checks, *map(_failure, failures)]


def _checks(hook: Hook) -> list[DoctorCheck]:
    """The checks of one plugin. Raises `TypeError` if it returned something else."""
    checks = list(hook() or ())
    for check in checks:
        if not isinstance(check, DoctorCheck):
            raise TypeError(f"it returned {check!r}; it must return a list of DoctorCheck")
    return checks


def _as_check(plugin: Plugin, check: DoctorCheck) -> Check:
    name = f"{check.name} ({plugin.name})"

    def run(context: Context) -> Findings:
        if check.topic == "run" and context.config is None:
            return []
        with log_if_slow(f"the check {name} of {plugin}", logging.WARNING, plugin.how_to_disable):
            return list(check.function(context.config))

    return Check(check.topic, name, run, f"The check is of {plugin}. {plugin.remedy}")


def _failure(message: str) -> Check:
    """The check that says that a plugin has no checks."""
    return Check("plugins", "checks", lambda context: [unknown(message)])
