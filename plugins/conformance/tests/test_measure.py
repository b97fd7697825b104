"""When tensors are equal, and when they cannot be compared."""

from __future__ import annotations

import math

import pytest
import torch

from rlframework_conformance.harness import Harness
from rlframework_conformance.layouts import Layout
from rlframework_conformance.measure import ConformanceFailure, exact, whole


def test_exact_is_equal_in_value_and_dtype():
    assert exact("q", torch.tensor([-0.0, math.nan]), torch.tensor([0.0, math.nan])).holds
    assert not exact("q", torch.tensor([1.0]), torch.tensor([1.0 + 1e-6])).holds
    with pytest.raises(ConformanceFailure, match=r"q has dtype torch\.float32; it must be torch\.float64"):
        exact("q", torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))


def test_a_whole_needs_equal_shapes():
    """One element would be broadcast to five."""
    with pytest.raises(ConformanceFailure, match=r"q: a has shape \(1,\); it must be \(5,\)"):
        whole("q", {"a": torch.ones(1)}, {"a": torch.ones(5)}, 1e-5)


@pytest.mark.parametrize("nothing", [{}, {"a": torch.zeros(0)}])
def test_a_whole_of_nothing_is_a_failure(nothing):
    with pytest.raises(ConformanceFailure, match="q: nothing to compare"):
        whole("q", nothing, nothing, 1e-5)


def test_named_tensors_of_nothing_are_a_failure(tmp_path):
    harness = Harness(None, Layout(), None, "cpu", tmp_path, tmp_path)
    with pytest.raises(ConformanceFailure, match="q as a whole: nothing to compare"):
        harness.tensors("q", {}, {}, 1e-5, 1e-5)


def test_a_whole_is_one_vector():
    """An error of (0.3, 0.4) on (3, 4) is a tenth."""
    got = {"a": torch.tensor([3.3]), "b": torch.tensor([4.4])}
    found = whole("q", got, {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 0.2)
    assert found.error == pytest.approx(0.1, rel=1e-5)
