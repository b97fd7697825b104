"""Metrics over microbatches, computed by hand."""

from __future__ import annotations

import pytest
import torch

from rlframework.policy.metrics import average_metrics, reduce_metrics


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            [
                {"loss": torch.tensor(1.5), "kl": 0.25, "ratio_min": 0.5, "ratio_max": torch.tensor(2.0)},
                {"loss": torch.tensor(0.5), "kl": 0.5, "ratio_min": 0.75, "ratio_max": torch.tensor(3.0)},
            ],
            {"loss": 2.0, "kl": 0.75, "ratio_min": 0.5, "ratio_max": 3.0},
        ),
        ([{}, {"loss": 1.0, "kl": 0.5}], {"loss": 1.0, "kl": 0.5}),  # a dummy contributes nothing
        ([{}], {"loss": 0.0}),
    ],
)
def test_metrics_of_microbatches(parts, expected):
    assert reduce_metrics(parts, None, torch.device("cpu")) == pytest.approx(expected)


def test_batches_are_averaged_over_those_that_have_a_metric():
    first = {"kl": 1.0, "ratio_max": 3.0, "ratio_min": 0.5}
    batches = [first, {"kl": 2.0, "ratio_max": 2.0, "ratio_min": 0.25}, {"kl": 6.0}]
    assert average_metrics(batches) == {"kl": 3.0, "ratio_max": 3.0, "ratio_min": 0.25}
    assert average_metrics([]) == {}
