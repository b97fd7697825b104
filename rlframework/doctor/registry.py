"""The registry of checks, in display order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlframework.doctor.context import Context
    from rlframework.doctor.findings import Finding

TOPICS = ("machine", "devices", "packages", "plugins", "cluster", "run")
"""Modules of this package, each of which registers its checks on import."""

Function = Callable[["Context"], "Iterable[Finding]"]


@dataclass(frozen=True)
class Check:
    """A registered check. `of_run`: it needs a configuration, and is skipped without one."""

    topic: str
    name: str
    function: Function
    of_run: bool = False


_CHECKS: list[Check] = []


def check(topic: str, name: str, *, of_run: bool = False) -> Callable[[Function], Function]:
    """Return a decorator that registers a function as the check `name` of `topic`."""

    def register(function: Function) -> Function:
        _CHECKS.append(Check(topic, name, function, of_run))
        return function

    return register


def all_checks() -> list[Check]:
    """Return every check, ordered by topic."""
    for topic in TOPICS:
        import_module(f"rlframework.doctor.{topic}")
    return sorted(_CHECKS, key=lambda one: TOPICS.index(one.topic))
