"""The checks by name, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlframework.doctor.context import Context
    from rlframework.doctor.findings import Finding

TOPICS = ("machine", "devices", "packages", "plugins", "cluster", "run")
"""Each is a module of this room, which registers its checks when it is imported."""

Function = Callable[["Context"], "Iterable[Finding]"]


@dataclass(frozen=True)
class Check:
    """`of_run`: it is about the run of a configuration, and is left out without one."""

    topic: str
    name: str
    function: Function
    of_run: bool = False


_CHECKS: list[Check] = []


def check(topic: str, name: str, *, of_run: bool = False) -> Callable[[Function], Function]:
    """Register the function below as the check `name` of `topic`."""

    def register(function: Function) -> Function:
        _CHECKS.append(Check(topic, name, function, of_run))
        return function

    return register


def all_checks() -> list[Check]:
    """Every check, by topic."""
    for topic in TOPICS:
        import_module(f"rlframework.doctor.{topic}")
    return sorted(_CHECKS, key=lambda one: TOPICS.index(one.topic))
