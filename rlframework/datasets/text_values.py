"""Values of data as texts: numbers in the way that people write them, and letters that are none."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

_EXACT = 2**53
"""Whole numbers below it have all their digits in a float."""


def is_missing(value: Any) -> bool:
    """Whether `value` is none: null, or not a number, which tables hold where there was no value."""
    return value is None or (isinstance(value, (float, Decimal)) and math.isnan(value))


def number_text(value: Any) -> str | None:
    """A number as text, a whole one without a fraction; None for what is no number, or an infinite one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, (float, Decimal)) or not math.isfinite(value):
        return None
    if isinstance(value, float) and abs(value) >= _EXACT:
        return str(value)
    if value == int(value):
        return str(int(value))
    return str(value) if isinstance(value, float) else format(value, "f")


def lone_surrogate(text: str) -> str | None:
    """Half a character, such as JSON's "\\ud83d" alone, which no tokenizer takes: how it is written; None without."""
    if text.isascii():
        return None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None
