"""The reward of the measured steps, for both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def odd_share(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """Return the share of characters with an odd code point in each completion."""
    return [sum(ord(character) % 2 for character in text) / max(len(text), 1) for text in completions]
