"""Numbers as texts, and letters that are none."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from rlframework.datasets.conversations import is_missing, lone_surrogate, number_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4, "4"),
        (4.0, "4"),
        (-0.0, "0"),
        (4.5, "4.5"),
        (2.0**52, "4503599627370496"),
        (1e300, "1e+300"),
        (Decimal("1.50"), "1.50"),
        (Decimal("3.00"), "3"),
        (Decimal("1E+2"), "100"),
        (Decimal("1E-7"), "0.0000001"),
        (10**30, "1" + "0" * 30),
        (10**400, "1" + "0" * 400),
        (True, None),
        ("4", None),
        (float("inf"), None),
        (Decimal("-Infinity"), None),
        (float("nan"), None),
    ],
)
def test_numbers(value: Any, text: str | None) -> None:
    assert number_text(value) == text


def test_what_is_no_value() -> None:
    assert [is_missing(value) for value in (None, float("nan"), Decimal("nan"))] == [True] * 3
    assert [is_missing(value) for value in (0, "", "nan", 0.0, float("inf"), [], Decimal(0))] == [False] * 7


def test_half_a_character() -> None:
    assert lone_surrogate("abc") is None
    assert lone_surrogate("é😀") is None
    assert lone_surrogate("é \ud83d!") == "\\ud83d"
