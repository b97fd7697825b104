"""The tool of the example, and the score of an answer."""

from rlframework.interfaces.environment import Sample


class Calculator:
    """Its public methods are tools."""

    def multiply(self, a: int, b: int) -> int:
        """Return the product of two integers."""
        return a * b


def correct(sample: Sample, completion: str) -> float:
    """Return 1 if the answer is the product, else 0."""
    return float(completion.strip() == sample.answer)
