"""Checks that plugins add to the doctor, through the hook `rlframework_doctor_checks`."""

from __future__ import annotations

import logging

from rlframework.base.errors import PluginError
from rlframework.base.logs import log_if_slow
from rlframework.plugins.discovery import Plugin
from rlframework.plugins.hook_calls import Hook
from rlframework.plugins.hookspec import DoctorCheck, DoctorFinding
from rlframework_tools.doctor.checks import Check, Context, Finding, Level, unknown


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

    def run(context: Context) -> list[Finding]:
        if check.topic == "run" and context.config is None:
            return []
        with log_if_slow(f"the check {name} of {plugin}", logging.WARNING, plugin.how_to_disable):
            return [_finding(finding) for finding in check.function(context.config)]

    return Check(check.topic, name, run, f"The check is of {plugin}. {plugin.remedy}")


def _finding(finding: DoctorFinding) -> Finding:
    if not isinstance(finding, DoctorFinding):
        raise TypeError(f"{finding!r} is no DoctorFinding")
    return Finding(Level(finding.level), finding.text, finding.remedy, finding.facts)


def _failure(message: str) -> Check:
    """The check that says that a plugin has no checks."""
    return Check("plugins", "checks", lambda context: [unknown(message)])
