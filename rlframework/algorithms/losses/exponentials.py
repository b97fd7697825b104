"""Exponentials of differences of log-probabilities that cannot overflow.

An infinite ratio is no large number but an end: its gradient is NaN wherever a clip, a mask or an advantage of 0 takes
the gradient away, because infinity times 0 is.
"""

from __future__ import annotations

from torch import Tensor

LARGEST_LOG = 40.0
"""Bound on the logarithm of a ratio: e^40 is beyond every clip and cap, and the product of two is finite in fp32."""


def bounded_exp(difference: Tensor) -> Tensor:
    """Return exp(`difference`), of at most `LARGEST_LOG`, beyond which it has no gradient."""
    return difference.clamp(max=LARGEST_LOG).exp()
