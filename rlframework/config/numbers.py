"""Types of the numbers in configurations, with bounds: a value beyond them is certainly a mistake.

Every number of a section has such a type or bounds of its own; infinity and NaN are rejected in all sections (`base`).
"""

from typing import Annotated

from pydantic import AfterValidator, Field

Steps = Annotated[int, Field(gt=0, le=1_000_000_000)]
"""A number of steps or samples, or the number of a step."""

StepsOrZero = Annotated[int, Field(ge=0, le=1_000_000_000)]
"""As `Steps`, where 0 has a meaning of its own."""

Count = Annotated[int, Field(gt=0, le=1_000_000)]
"""A number of things that exist at the same time, such as the rows of a batch."""

CountOrZero = Annotated[int, Field(ge=0, le=1_000_000)]
"""As `Count`, where 0 has a meaning of its own."""

Tokens = Annotated[int, Field(gt=0, le=10_000_000)]
"""A number of tokens, of a row or of a microbatch."""

TokensOrZero = Annotated[int, Field(ge=0, le=10_000_000)]
"""As `Tokens`, where 0 has a meaning of its own; also the id of a token."""

Workers = Annotated[int, Field(gt=0, le=100_000)]
"""A number of processes, or of the parts that something is divided into, one a process."""

Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""The seed of a random number generator."""

Seconds = Annotated[float, Field(gt=0.0, le=1e7)]
"""A duration, at most 116 days."""

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
"""A share of a whole."""

Coefficient = Annotated[float, Field(ge=0.0, le=1e6)]
"""The weight of a term; 0 leaves it out."""

Limit = Annotated[float, Field(gt=0.0, le=1e9)]
"""A bound on a quantity, or another positive quantity."""

LearningRate = Annotated[float, Field(ge=0.0, le=1e6)]
"""A learning rate or a decay of weights per step; with a large epsilon, a large one makes Adam gradient descent."""


def _not_tiny(temperature: float) -> float:
    if 0.0 < temperature < 1e-3:
        raise ValueError("must be 0 or at least 0.001, because logits divided by less are not finite")
    return temperature


Temperature = Annotated[float, Field(ge=0.0, le=100.0), AfterValidator(_not_tiny)]
"""A sampling temperature; 0 is greedy decoding."""
