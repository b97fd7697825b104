"""A class whose methods are tools, for the suite of environments."""

from __future__ import annotations


class Calculator:
    """Keeps its last result."""

    def __init__(self) -> None:
        self.last = 0.0

    def add(self, a: float, b: float) -> float:
        """Add two numbers."""
        self.last = a + b
        return self.last

    def repeat(self, text: str, times: int = 2) -> str:
        """Repeat a text."""
        return text * min(times, 10)

    def recall(self) -> float:
        """Return the last sum."""
        return self.last
