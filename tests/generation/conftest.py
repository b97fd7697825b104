"""The tiny model of `tests/fixtures/tiny_generation.py`, and independent ways to generate with it."""

from tiny_generation import batch, completions, plain_greedy, tiny  # noqa: F401 - fixtures
