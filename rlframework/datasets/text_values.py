"""Data values as text: numbers as people write them, missing values, and lone surrogates."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

_EXACT = 2**53
"""Integers below this are exact as floats."""


def is_missing(value: Any) -> bool:
    """Whether `value` is missing: null or NaN, which tables use for absent values."""
    return value is None or (isinstance(value, (float, Decimal)) and math.isnan(value))


def number_text(value: Any) -> str | None:
    """Return a number as text, integers without a fraction; None for infinities and values that are not numbers."""
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
    """Return the first lone surrogate in `text` as an escape such as "\\ud83d", or None. No tokenizer accepts one."""
    if text.isascii():
        return None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None
