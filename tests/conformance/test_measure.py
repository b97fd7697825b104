"""What counts as equal, and what cannot be compared at all."""

from __future__ import annotations

import math

import pytest
import torch

from rlframework.conformance.bench import Bench
from rlframework.conformance.layouts import Layout
from rlframework.conformance.measure import ConformanceFailure, exact, whole


def test_exact_is_equal_in_value_and_dtype():
    assert exact("q", torch.tensor([-0.0, math.nan]), torch.tensor([0.0, math.nan])).holds
    assert not exact("q", torch.tensor([1.0]), torch.tensor([1.0 + 1e-6])).holds
    with pytest.raises(ConformanceFailure, match=r"q is torch\.float32, and must be torch\.float64"):
        exact("q", torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))


def test_a_whole_needs_equal_shapes():
    """One element against five would be spread over them."""
    with pytest.raises(ConformanceFailure, match=r"q: a has shape \(1,\), and must have \(5,\)"):
        whole("q", {"a": torch.ones(1)}, {"a": torch.ones(5)}, 1e-5)


@pytest.mark.parametrize("nothing", [{}, {"a": torch.zeros(0)}])
def test_a_whole_of_nothing_is_a_failure(nothing):
    with pytest.raises(ConformanceFailure, match="q: there is nothing to compare"):
        whole("q", nothing, nothing, 1e-5)


def test_named_tensors_of_nothing_are_a_failure(tmp_path):
    bench = Bench(None, Layout(), None, "cpu", tmp_path, tmp_path)
    with pytest.raises(ConformanceFailure, match="q as a whole: there is nothing to compare"):
        bench.tensors("q", {}, {}, 1e-5, 1e-5)


def test_a_whole_is_one_vector():
    """Off by (0.3, 0.4) from (3, 4): a tenth."""
    got = {"a": torch.tensor([3.3]), "b": torch.tensor([4.4])}
    found = whole("q", got, {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 0.2)
    assert found.error == pytest.approx(0.1, rel=1e-5)
