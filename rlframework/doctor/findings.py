"""What a check found: how bad, what, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How bad a finding is. `broken` alone makes the exit code 1; `unknown`: the check itself could not be done."""

    OK = "ok"
    NOTE = "note"
    UNKNOWN = "unknown"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """`text` says what is there, `remedy` what to do, `facts` the same as values of JSON's types.

    `topic` and `name` are those of the check, which need not set them.
    """

    level: Level
    text: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    topic: str = ""
    name: str = ""


def ok(text: str, **facts: Any) -> Finding:
    """All is well."""
    return Finding(Level.OK, text, facts=facts)


def note(text: str, remedy: str = "", **facts: Any) -> Finding:
    """Nothing is wrong, and it is good to know."""
    return Finding(Level.NOTE, text, remedy, facts)


def unknown(text: str, remedy: str = "", **facts: Any) -> Finding:
    """It could not be found out."""
    return Finding(Level.UNKNOWN, text, remedy, facts)


def warning(text: str, remedy: str, **facts: Any) -> Finding:
    """It works, but badly, or not for long, or not everything."""
    return Finding(Level.WARNING, text, remedy, facts)


def broken(text: str, remedy: str, **facts: Any) -> Finding:
    """Something that is needed does not work."""
    return Finding(Level.BROKEN, text, remedy, facts)
