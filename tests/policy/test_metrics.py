"""Metrics over microbatches, computed by hand."""

from __future__ import annotations

import pytest
import torch

from rlframework.policy.metrics import average_metrics, reduce_metrics


def test_sums_minima_and_maxima():
    parts = [
        {"loss": torch.tensor(1.5), "kl": 0.25, "ratio_min": 0.5, "ratio_max": torch.tensor(2.0)},
        {"loss": torch.tensor(0.5), "kl": 0.5, "ratio_min": 0.75, "ratio_max": torch.tensor(3.0)},
    ]
    metrics = reduce_metrics(parts, None, torch.device("cpu"))
    assert metrics == pytest.approx({"loss": 2.0, "kl": 0.75, "ratio_min": 0.5, "ratio_max": 3.0})


def test_a_dummy_contributes_nothing():
    metrics = reduce_metrics([{}, {"loss": 1.0, "kl": 0.5}], None, torch.device("cpu"))
    assert metrics == {"loss": 1.0, "kl": 0.5}


def test_dummies_alone_give_a_loss_of_zero():
    assert reduce_metrics([{}], None, torch.device("cpu")) == {"loss": 0.0}


def test_batches_are_averaged_over_those_that_have_a_metric():
    first = {"kl": 1.0, "ratio_max": 3.0, "ratio_min": 0.5}
    batches = [first, {"kl": 2.0, "ratio_max": 2.0, "ratio_min": 0.25}, {"kl": 6.0}]
    assert average_metrics(batches) == {"kl": 3.0, "ratio_max": 3.0, "ratio_min": 0.25}
    assert average_metrics([]) == {}
