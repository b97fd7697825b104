"""Runs the checks concurrently and independently, and hides secrets in their findings."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from rlframework.doctor.context import Context
from rlframework.doctor.findings import Finding, Level, unknown
from rlframework.doctor.registry import Check, all_checks
from rlframework.observers.secrets import HIDDEN, hide_in_text, hide_secrets, is_secret_name

_TOGETHER = 8
_SHORTEST_SECRET = 6


@dataclass(frozen=True)
class Examination:
    """The findings, in the order of the checks. `of_run`: a configuration was given."""

    findings: tuple[Finding, ...]
    of_run: bool

    @property
    def exit_code(self) -> int:
        """1 if something is broken, else 0."""
        return int(any(finding.level is Level.BROKEN for finding in self.findings))


def examine(
    source: str | None = None, overrides: Sequence[str] = (), checks: Sequence[Check] | None = None
) -> Examination:
    """Check this machine and, if given, the run of the configuration `source`.

    `checks` replaces the default list of all checks. Output of plugins and libraries goes to stderr.
    """
    with contextlib.redirect_stdout(sys.stderr):
        context = Context(source, overrides)
        chosen = [one for one in (all_checks() if checks is None else checks) if source is not None or not one.of_run]
        with ThreadPoolExecutor(_TOGETHER, thread_name_prefix="doctor") as pool:
            found = list(pool.map(lambda one: _findings(one, context), chosen))
    secrets = secret_values(os.environ)
    return Examination(tuple(_hidden(finding, secrets) for some in found for finding in some), source is not None)


def secret_values(variables: Mapping[str, str]) -> list[str]:
    """Return the values of variables that are named like secrets, except values too short to be secrets."""
    found = {value for name, value in variables.items() if is_secret_name(name) and len(value) >= _SHORTEST_SECRET}
    return sorted(found, key=len, reverse=True)


def _findings(one: Check, context: Context) -> list[Finding]:
    """The findings of one check; an exception becomes a finding."""
    try:
        found = list(one.function(context))
    except Exception as error:  # noqa: BLE001 - an error in one check must not stop the others
        found = [
            unknown(
                f"could not be checked: {type(error).__name__}: {error}",
                "Please report this bug in the doctor",
            )
        ]
    return [replace(finding, topic=one.topic, name=one.name) for finding in found]


def _hidden(finding: Finding, secrets: Sequence[str]) -> Finding:
    def clean(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, HIDDEN)
        return hide_in_text(text)

    return replace(
        finding,
        text=clean(finding.text),
        remedy=clean(finding.remedy),
        facts=_mapped(hide_secrets(finding.facts), clean),
    )


def _mapped(value: Any, clean: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(item, clean) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, clean) for item in value]
    return clean(value) if isinstance(value, str) else value
