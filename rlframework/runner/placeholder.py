"""Stands for a part of a run whose workers are not started yet."""

from __future__ import annotations

from typing import Any

from rlframework.base.errors import NotSupported


class Placeholder:
    """Has the attributes `known`. Every other raises `NotSupported`, as there are no workers yet."""

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotSupported(f"no worker is started yet, and {name!r} needs one; call it in `Algorithm.run`")
