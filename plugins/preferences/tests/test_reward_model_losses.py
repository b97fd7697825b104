"""Losses of reward models against their formulas, written out pair by pair and step by step in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework_preferences.config import RewardModelTrainingConfig
from rlframework_preferences.preference_losses import BradleyTerryLoss, StepLoss

PAIRS = 5


def pairs_of(seed: int = 0) -> tuple[Tensor, BatchedDataDict[Any]]:
    """Scores `[B]` with gradient, and rows in random order of five pairs, one of them masked out."""
    generator = torch.Generator().manual_seed(seed)
    pairs, order = torch.arange(2 * PAIRS) // 2, torch.randperm(2 * PAIRS, generator=generator)
    scores = torch.randn(2 * PAIRS, generator=generator, dtype=torch.float64)
    data = {
        "group_ids": torch.tensor([40, 7, 300, -2, 8])[pairs],
        "chosen": (torch.arange(2 * PAIRS) % 2 == 0).double(),
        "sample_mask": (pairs != 2).double(),
        "margin": torch.rand(PAIRS, generator=generator, dtype=torch.float64)[pairs],
    }
    return scores[order].requires_grad_(), BatchedDataDict({name: value[order] for name, value in data.items()})


def expected(scores: Tensor, data: BatchedDataDict[Any], config: RewardModelTrainingConfig) -> Tensor:
    """The mean over pairs of minus the logarithm of a logistic function, term by term."""
    found: dict[int, dict[float, Tensor]] = {}
    margins = {}
    for row, group in enumerate(data["group_ids"].tolist()):
        if data["sample_mask"][row]:
            found.setdefault(group, {})[float(data["chosen"][row])] = scores[row]
            margins[group] = float(data["margin"][row])
    terms = []
    for group, pair in found.items():
        won, lost = pair[1.0], pair[0.0]
        gap, error = won - lost - config.margin_coef * margins[group], config.label_smoothing
        right, wrong = 1 / (1 + torch.exp(-gap)), 1 / (1 + torch.exp(gap))
        if config.smoothing == "conservative":
            term = -(1 - error) * torch.log(right) - error * torch.log(wrong)
        else:
            term = (-(1 - error) * torch.log(right) + error * torch.log(wrong)) / (1 - 2 * error)
        terms.append(term + config.centering_coef * (won + lost) ** 2)
    return torch.stack(terms).mean()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "margin": {"margin_coef": 1.5},
    "centered": {"centering_coef": 0.01},
    "smoothed": {"label_smoothing": 0.2},
    "all": {"label_smoothing": 0.1, "smoothing": "robust", "margin_coef": 0.5, "centering_coef": 0.3},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_pairs_of_scores_follow_bradley_and_terry(case: str, seed: int) -> None:
    config = RewardModelTrainingConfig(**CASES[case])
    scores, data = pairs_of(seed)
    loss, metrics = BradleyTerryLoss(config)(scores, data, data["sample_mask"].sum(), torch.tensor(0.0))
    loss.backward()
    given, scores.grad = scores.grad, None
    right = expected(scores, data, config)
    right.backward()
    assert loss.item() == pytest.approx(right.item(), rel=1e-9)
    torch.testing.assert_close(given, scores.grad, rtol=1e-9, atol=1e-12)
    assert ("centering_loss" in metrics) == bool(config.centering_coef)


@pytest.mark.parametrize("case", CASES)
def test_microbatches_of_pairs_add_up(case: str) -> None:
    loss_fn = BradleyTerryLoss(RewardModelTrainingConfig(**CASES[case]))
    scores, data = pairs_of(2)
    count = data["sample_mask"].sum()
    whole, metrics = loss_fn(scores, data, count, count)
    total, sums = 0.0, dict.fromkeys(metrics, 0.0)
    for groups in ((40,), (7, 300, -2), (8,)):
        rows = torch.tensor([row for row, group in enumerate(data["group_ids"].tolist()) if group in groups])
        part = BatchedDataDict({name: value[rows] for name, value in data.items()})
        loss, found = loss_fn(scores[rows], part, count, count)
        total += loss.item()
        sums = {name: value + float(found[name]) for name, value in sums.items()}
    assert total == pytest.approx(whole.item(), rel=1e-12)
    assert sums == pytest.approx({name: float(value) for name, value in metrics.items()}, rel=1e-12, abs=1e-15)


def two_pairs(scores: list[float], margin: float) -> tuple[Tensor, BatchedDataDict[Any]]:
    rows = {"group_ids": [0, 0, 1, 1], "chosen": [1.0, 0, 1, 0], "sample_mask": [1.0] * 4, "margin": [margin] * 4}
    return torch.tensor(scores), BatchedDataDict({name: torch.tensor(value) for name, value in rows.items()})


@pytest.mark.parametrize(
    ("keys", "loss"),
    [
        ({}, 0.2200949),  # (log(1 + e^-1) + log(1 + e^-2)) / 2
        ({"margin_coef": 1.0}, 0.3132617 / 2 + 0.6931472 / 2),  # a margin of 1: log(1 + e^-1) and log 2
        ({"centering_coef": 0.01}, 0.2200949 + 0.01 * (9 + 4) / 2),  # sums of 3 and -2
    ],
)
def test_values_worked_out_by_hand(keys: dict[str, float], loss: float) -> None:
    scores, data = two_pairs([2.0, 1.0, 0.0, -2.0], margin=1.0)
    found, metrics = BradleyTerryLoss(RewardModelTrainingConfig(**keys))(
        scores, data, torch.tensor(4.0), torch.tensor(0.0)
    )
    assert found.item() == pytest.approx(loss, abs=1e-6)
    assert metrics["accuracy"] == 1
    assert metrics["margin"].item() == pytest.approx(1.5)
    assert metrics["chosen_reward"].item() == pytest.approx(1.0)


@pytest.mark.parametrize("seed", [0, 1])
def test_steps_have_a_binary_cross_entropy(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(3, 6, generator=generator, dtype=torch.float64)

    mask, labels = (uniform() > 0.5).double(), uniform()
    values = (4 * uniform()[:, 1:] - 2).requires_grad_()
    data = BatchedDataDict({"token_mask": mask, "sample_mask": torch.tensor([1.0, 0, 1]), "step_labels": labels})
    steps = [(row, step) for row in (0, 2) for step in range(1, 6) if mask[row, step]]
    loss, metrics = StepLoss()(values, data, torch.tensor(2.0), torch.tensor(float(len(steps)), dtype=torch.float64))
    loss.backward()
    given, values.grad = values.grad, None
    terms, right = [], 0
    for row, step in steps:
        value, label = values[row, step - 1], float(labels[row, step])
        terms.append(
            -label * torch.log(1 / (1 + torch.exp(-value))) - (1 - label) * torch.log(1 / (1 + torch.exp(value)))
        )
        right += (float(value.detach()) > 0) == (label > 0.5)
    total = torch.stack(terms).mean()
    total.backward()
    assert loss.item() == pytest.approx(total.item(), rel=1e-9)
    torch.testing.assert_close(given, values.grad, rtol=1e-9, atol=1e-12)
    assert metrics["accuracy"].item() == pytest.approx(right / len(steps))
