"""Compare a model's final answer with the gold answer by math-verify, safely for untrusted text.

math-verify evaluates what it parses. `9^9^9^9`, `100000000!` or a large binomial would keep it busy forever, in one
operation on a big integer that no signal interrupts; its own timeouts work in the main thread only. So LaTeX is parsed
only if it consists of fractions, products and layout, and only plain arithmetic is compared: numbers, sums, products,
fractions, percentages and small powers.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from typing import Any

_TAIL = 2000
"""Number of characters at the end of a completion in which to search for the answer."""

_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_FRACTIONS = {"frac", "dfrac", "tfrac", "cdot", "times", "div"}
_LAYOUT = {"boxed", "left", "right", "text", "textbf", "mathrm", "mathbf", "displaystyle", "quad", "qquad"}
_GROWS = re.compile(r"\^|[\d)}\]]\s*!")
"""Powers and factorials."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_UNIT = re.compile(r"\\(?:text|mathrm)\{[^{}]*\}")
_ARITHMETIC = re.compile(r"[\d\s+\-*/.,(){}$%]*")

_MAX_EXPONENT = 64
_MAX_DIGITS = 400


def same_answer(gold: str, completion: str) -> bool:
    """Whether the final answer in `completion` equals `gold` (a number, or anything that math-verify parses)."""
    verify = _math_verify()[1]
    target = [part for part in _parse(_final(completion)) if _is_plain(part)]
    return bool(verify(list(_parse_gold(gold)), target, timeout_seconds=None))


def is_comparable(gold: str) -> bool:
    """Whether `same_answer` can compare `gold`: plain arithmetic, also in LaTeX, without roots, powers or words."""
    if _NUMBER.fullmatch(gold):
        return True
    plain = _is_safe(gold) and _ARITHMETIC.fullmatch(_COMMAND.sub("", _UNIT.sub("", gold)))
    return bool(plain) and any(_is_plain(part) for part in _parse_gold(gold))


def _final(completion: str) -> str:
    """The text after the last `####`, else the last `\\boxed{...}`, else all; at most `_TAIL` characters."""
    text = completion[-_TAIL:]
    if "####" in text:
        text = text.rsplit("####", 1)[-1]
    elif "\\boxed{" in text:
        inside = text.rsplit("\\boxed{", 1)[-1]
        depths = itertools.accumulate((c == "{") - (c == "}") for c in inside)
        end = next((position for position, depth in enumerate(depths) if depth < 0), len(inside))
        text = "\\boxed{" + inside[:end] + "}"
    return text.replace("\\$", "$")


@functools.lru_cache(maxsize=16384)
def _parse_gold(gold: str) -> tuple[Any, ...]:
    return tuple(_parse(gold))


def _parse(text: str) -> list[Any]:
    parse, _, latex, plain = _math_verify()
    return list(parse(text, [latex(), plain()] if _is_safe(text) else [plain()], parsing_timeout=None))


def _is_safe(text: str) -> bool:
    """Whether `text` can be parsed as LaTeX in bounded time."""
    return (_FRACTIONS | _LAYOUT).issuperset(_COMMAND.findall(text)) and not _GROWS.search(text)


def _is_plain(part: Any) -> bool:
    """Whether comparing `part` is certain to be fast: a short string, or arithmetic on numbers."""
    import sympy

    if isinstance(part, str):
        return len(part) <= _MAX_DIGITS
    return isinstance(part, sympy.Basic) and all(map(_is_plain_node, sympy.preorder_traversal(part)))


def _is_plain_node(node: Any) -> bool:
    import sympy

    if isinstance(node, sympy.Integer):
        return abs(int(node)).bit_length() <= 4 * _MAX_DIGITS
    if isinstance(node, sympy.Pow):
        base, exponent = node.args
        small = isinstance(exponent, sympy.Integer) and abs(int(exponent)) <= _MAX_EXPONENT
        return small and not base.has(sympy.Pow)
    return isinstance(node, sympy.Number | sympy.Add | sympy.Mul | sympy.Symbol | sympy.Eq)


@functools.lru_cache(maxsize=1)
def _math_verify() -> tuple[Any, Any, Any, Any]:
    """math-verify's `parse`, `verify` and two extraction settings, imported on first use, without warnings."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    return parse, verify, LatexExtractionConfig, ExprExtractionConfig
