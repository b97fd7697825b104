"""Temporarily replacing attributes of a library's modules, classes and objects, where it has no option for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replacing(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set `attributes` of `owner` and restore them on exit; raise `AttributeError` if it lacks one of them.

    An attribute that `owner` inherits from its class is removed again. Other threads see the replacements too.
    """
    for name in attributes:
        getattr(owner, name)
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in attributes:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)
