"""The bound on differences of log-probabilities: by dtype, and by the noise that was measured."""

from __future__ import annotations

from typing import Any

import pytest

from rlframework.weight_sync.proof import NoiseBound

DECLARED = {"float32": 1e-3, "bfloat16": 0.3}


def bound_of(configured: float | None = None, *dtypes: str, tf32: bool = False) -> NoiseBound:
    headroom = {"float32": 10.0, "bfloat16": 4.0}
    return NoiseBound.of(configured, DECLARED, dtypes=dtypes or {"float32"}, tf32=tf32, headroom=headroom)


@pytest.mark.parametrize(
    ("arguments", "limit", "dtype"),
    [
        ((None, "float32"), 1e-3, "float32"),
        ((None, "bfloat16"), 0.3, "bfloat16"),
        ((None, "float16"), 0.05, "float16"),  # not declared: the default
        ((None, "float32", "bfloat16"), 0.3, "bfloat16"),
        ((0.5, "float32"), 0.5, "float32"),
    ],
)
def test_the_limit_is_that_of_the_coarser_dtype(arguments: Any, limit: float, dtype: str) -> None:
    bound = bound_of(*arguments)
    assert (bound.value, bound.dtype) == (limit, dtype)


def test_tf32_is_coarser_than_fp32_and_of_no_importance_in_16_bits() -> None:
    assert bound_of(None, "float32", tf32=True).value == 0.02
    assert bound_of(None, "bfloat16", tf32=True).value == 0.3


def test_the_largest_noise_so_far_tightens_the_bound_between_the_floor_and_the_limit() -> None:
    bound, values = bound_of(), list[float]()
    for noise in (3e-7, 2e-5, 1e-6, 9e-5, 5e-4):
        bound.accepted(noise)
        values.append(bound.value)
    assert values == pytest.approx([1e-4, 2e-4, 2e-4, 9e-4, 1e-3])


@pytest.mark.parametrize("bound", [bound_of(0.5), bound_of(None, "float32", tf32=True)])
def test_what_was_configured_or_has_no_headroom_is_not_tightened(bound: NoiseBound) -> None:
    before = bound.value
    bound.accepted(1e-7)
    assert bound.value == before
