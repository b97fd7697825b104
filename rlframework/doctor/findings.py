"""The results of checks: severity, description and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """The severity of a finding. Only `broken` makes the exit code 1; `unknown`: the check itself failed."""

    OK = "ok"
    NOTE = "note"
    UNKNOWN = "unknown"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One result of a check: a description, what to do about it, and the facts as JSON values.

    The runner sets `topic` and `name` to those of the check.
    """

    level: Level
    text: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    topic: str = ""
    name: str = ""


def ok(text: str, **facts: Any) -> Finding:
    """Report that everything is fine."""
    return Finding(Level.OK, text, facts=facts)


def note(text: str, remedy: str = "", **facts: Any) -> Finding:
    """Report something worth knowing that is not a problem."""
    return Finding(Level.NOTE, text, remedy, facts)


def unknown(text: str, remedy: str = "", **facts: Any) -> Finding:
    """Report that something could not be determined."""
    return Finding(Level.UNKNOWN, text, remedy, facts)


def warning(text: str, remedy: str, **facts: Any) -> Finding:
    """Report a limitation: it works only partly, slowly, or not for long."""
    return Finding(Level.WARNING, text, remedy, facts)


def broken(text: str, remedy: str, **facts: Any) -> Finding:
    """Report that something required does not work."""
    return Finding(Level.BROKEN, text, remedy, facts)
