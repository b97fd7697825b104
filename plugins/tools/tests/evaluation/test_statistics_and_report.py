"""Statistics of an evaluation against values computed by hand, and the checks of its settings."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlframework.algorithms import intervals
from rlframework.algorithms.intervals import bootstrap, estimate, pass_at_k, wilson
from rlframework.base.errors import ConfigError, DataError
from rlframework_tools.evaluation.plan import choose_attempts
from rlframework_tools.evaluation.report import Evaluation, differences, paired_difference


@pytest.mark.slow
@given(st.integers(1, 8), st.data())
def test_pass_at_k_counts_all_choices(attempts, data):
    right, k = data.draw(st.integers(0, attempts)), data.draw(st.integers(1, attempts))
    marks = [True] * right + [False] * (attempts - right)
    choices = list(itertools.combinations(marks, k))
    assert pass_at_k(attempts, right, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def test_wilsons_interval_by_hand():
    """7 of 10: z = 1.959964, z^2 = 3.841459.

    Centre (0.7 + 3.841459 / 20) / (1 + 3.841459 / 10) = 0.892073 / 1.384146 = 0.644493; half
    1.959964 * sqrt(0.021 + 3.841459 / 400) / 1.384146 = 1.959964 * 0.174940 / 1.384146 = 0.247715.
    0 of n: from 0 to z^2 / (n + z^2): 3.841459 / 13.841459 of ten.
    """
    assert wilson(7, 10) == pytest.approx((0.396778, 0.892208), abs=1e-6)
    assert wilson(3, 10) == pytest.approx((1 - 0.892208, 1 - 0.396778), abs=1e-6)
    assert wilson(0, 10) == (0.0, pytest.approx(0.277533, abs=1e-6))
    assert wilson(10, 10) == (pytest.approx(1 - 0.277533, abs=1e-6), 1.0)


def test_the_bootstrap_of_two_values_by_hand(monkeypatch):
    """Means of two draws of 0 and 1 are 0, 1/2 and 1 with probability 1/4, 1/2, 1/4: the percentiles are 0 and 1."""
    assert bootstrap([0.0, 1.0]) == (0.0, 1.0)
    monkeypatch.setattr(intervals, "LEVEL", 0.4)  # from 0.3 to 0.7
    assert bootstrap([0.0, 1.0]) == (0.5, 0.5)


def test_proportions_get_wilsons_interval_and_other_means_the_bootstrap():
    found = estimate([1.0] * 7 + [0.0] * 3)
    assert (found.value, found.method) == (0.7, "wilson")
    assert (found.low, found.high) == pytest.approx((0.396778, 0.892208), abs=1e-6)
    assert estimate([1.0]).low == pytest.approx(1 / (1 + 3.841459), abs=1e-6)
    assert estimate([1.0, 0.5, 0.0]).method == "bootstrap"


def test_zeros_have_an_interval_only_as_shares():
    result = Evaluation()
    result.add(["a", "b"], {"accuracy": [0.0, 0.0], "short": [0.0, 0.0], "right": [1.0, 0.0]})
    methods = {name: (found.value, found.method) for name, found in result.estimates.items()}
    assert methods == {"accuracy": (0.0, "wilson"), "short": (0.0, None), "right": (0.5, "wilson")}
    assert result.estimates["short"].low is None


@pytest.mark.parametrize("values", [[0.5], [4.0, 4.0, 4.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_what_tells_no_interval(values):
    found = estimate(values)
    assert (found.low, found.high, found.method) == (None, None, None)


def test_a_paired_difference_is_finer_than_two_intervals():
    """One model is better by 0.1 +- 0.05 on every prompt, regardless of its difficulty: 0.1 +- 0.0098.

    The deviation is 0.05, so the standard error over 100 prompts is 0.005.
    """
    first = [n / 100 for n in range(100)]
    other = [value + (0.15 if number % 2 else 0.05) for number, value in enumerate(first)]
    found = paired_difference(first, other)
    assert found.value == pytest.approx(0.1)
    assert found.low == pytest.approx(0.1 - 0.0098, abs=0.001)
    assert found.high == pytest.approx(0.1 + 0.0098, abs=0.001)
    assert paired_difference(other, first).value == pytest.approx(-0.1)


def test_other_prompts_are_not_compared():
    first = Evaluation(ids=["a", "b"], values={"reward": [0.0, 1.0]})
    assert differences(first, Evaluation(ids=["a", "b"], values={"reward": [1.0, 1.0]}))["reward"].value == 0.5
    with pytest.raises(DataError, match="evaluated on different prompts"):
        differences(first, Evaluation(ids=["b", "a"], values={"reward": [1.0, 0.0]}))


@pytest.mark.parametrize(
    ("temperature", "attempts", "ks", "sampled", "chosen"),
    [
        (1.0, None, [], False, (1, (), True)),
        (0.7, None, [], True, (1, (), False)),
        (0.0, None, [], True, (1, (), True)),
        (1.0, 6, [], False, (6, (1, 2, 4, 6), False)),
        (1.0, 8, [], False, (8, (1, 2, 4, 8), False)),
        (1.0, None, [4, 1, 4], False, (4, (1, 4), False)),
    ],
)
def test_attempts_by_default(temperature, attempts, ks, sampled, chosen):
    assert choose_attempts(temperature, attempts, ks, sampled) == chosen


@pytest.mark.parametrize(
    ("attempts", "ks", "temperature", "message"),
    [
        (4, [1, 8], 1.0, "--k 8: with 4 attempts, k must be from 1 to 4"),
        (None, [0], 1.0, "--k 0"),
        (4, [], 0.0, "--attempts 4: all attempts at temperature 0 are the same"),
    ],
)
def test_attempts_that_contradict_each_other(attempts, ks, temperature, message):
    with pytest.raises(ConfigError, match=message):
        choose_attempts(temperature, attempts, ks, sampled=False)


def test_a_metric_that_some_prompts_lack_is_a_mean_over_the_others():
    first, other = Evaluation(), Evaluation()
    first.add(["a", "b"], {"reward": [1.0, 2.0]})
    first.add(["c"], {"reward": [6.0], "named": [4.0]})
    other.add(["a", "b", "c"], {"reward": [1.0, 1.0, 1.0], "named": [5.0, math.nan, 6.0]})
    assert first.estimates["reward"].value == 3.0
    assert first.estimates["named"].value == 4.0
    assert other.estimates["named"].value == 5.5
    found = differences(first, other)
    assert found["reward"].value == -2.0
    assert found["named"].value == 2.0
    other.values["lone"] = [math.nan, math.nan, math.nan]
    assert "lone" not in other.estimates
    assert "lone" not in differences(first, other)
