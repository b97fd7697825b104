"""The interface of replies that the server sends, of each API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

C_contra = TypeVar("C_contra", contravariant=True)


class Reply(Protocol[C_contra]):
    """A reply that is sent as one object or as events, made from what was sampled."""

    def whole(self, choices: Sequence[C_contra]) -> dict[str, Any]:
        """Return the reply as one object."""
        ...

    def begin(self) -> Iterator[str]:
        """Return the events before anything is sampled."""
        ...

    def events(self, choices: Sequence[C_contra]) -> Iterator[str]:
        """Return the events of what was sampled."""
        ...

    def failure(self, error: Mapping[str, Any]) -> Iterator[str]:
        """Return the events of a request that could not be answered."""
        ...
