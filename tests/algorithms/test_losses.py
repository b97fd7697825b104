"""Losses against values worked out by hand, and their independence of how the batch is split."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.algorithms.losses import ClippedPGLoss, NLLLoss, mismatch_metrics
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.interfaces.loss import LossFunction


def counts(data: BatchedDataDict[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return data["sample_mask"].sum(), (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()


def shifted(values: list[list[float]]) -> torch.Tensor:
    """`[B, S]` with a leading column that must never be read."""
    tensor = torch.tensor(values)
    return torch.cat((torch.full((len(values), 1), 99.0), tensor), dim=1)


def batch(
    token_mask: list[list[float]], sample_mask: list[float], **columns: list[list[float]]
) -> BatchedDataDict[Any]:
    data = {"token_mask": shifted(token_mask), "sample_mask": torch.tensor(sample_mask)}
    return BatchedDataDict(data | {name: shifted(value) for name, value in columns.items()})


def pg(**options: Any) -> ClippedPGLoss:
    return ClippedPGLoss(ClippedPGLossConfig(**options))


def ratios(data: BatchedDataDict[Any], values: list[list[float]]) -> torch.Tensor:
    return (data["prev_logprobs"][:, 1:] + torch.tensor(values).log()).requires_grad_()


def test_clipping_by_hand():
    data = batch([[1, 1, 1, 1]], [1], advantages=[[2.0, 2.0, -2.0, -2.0]], prev_logprobs=[[-1.0, -1.0, -1.0, -1.0]])
    logprobs = ratios(data, [[1.1, 1.5, 0.5, 1.5]])
    loss, metrics = pg(ratio_clip_min=0.2, ratio_clip_max=0.28)(logprobs, data, *counts(data))
    # 2 * 1.1; 2 * 1.28 clipped; -2 * 0.8 clipped; -2 * 1.5 stays
    assert loss.item() == pytest.approx(-(2.2 + 2.56 - 1.6 - 3.0) / 4, abs=1e-6)
    assert metrics["clip_fraction"].item() == pytest.approx(0.5)
    loss.backward()
    assert logprobs.grad.flatten().tolist() == pytest.approx([-2.2 / 4, 0, 0, 3.0 / 4])


def test_dual_clip_where_the_ratio_overflows():
    """A log-ratio of 100, whose exponential is infinite in fp32: -A c = 6 at A = -2, and 0 at A = 0."""
    data = batch([[1, 1, 0]], [1], advantages=[[-2.0, 0.0, -2.0]], prev_logprobs=[[-101.0, -101.0, -101.0]])
    logprobs = torch.full((1, 3), -1.0, requires_grad=True)
    loss, metrics = pg(ratio_clip_c=3.0)(logprobs, data, *counts(data))
    assert loss.item() == pytest.approx((6.0 + 0.0) / 2)
    loss.backward()
    assert logprobs.grad.tolist() == [[0.0, 0.0, 0.0]]
    assert math.isfinite(metrics["ratio"].item())


EXTREME: list[dict[str, Any]] = [
    *({"ratio": ratio, "ratio_clip_c": 3.0} for ratio in ("token", "sequence", "sequence_token", "product")),
    {"surrogate": "cispo"},
    {},
    {"kl_coef": 0.1},
    *({"kl_coef": 0.1, "kl_correction": correction} for correction in ("ratio", "score", "generator")),
    {"kl_coef": 0.1, "kl_correction": "ratio", "kl_max": 10.0},
    {"kl_coef": 0.1, "kl_estimator": "k2", "kl_correction": "generator"},
    *(
        {"importance_correction": "truncated", "importance_level": level, "importance_mask": level}
        for level in ("token", "sequence", "geometric")
    ),
]


@pytest.mark.parametrize("options", EXTREME, ids=str)
def test_losses_and_gradients_are_finite_whatever_the_log_probabilities(options):
    """Log-ratios to all other policies of -200 to 200, with each sign of the advantage, also where nothing counts."""
    far = [-200.0, -100.0, 100.0, 200.0]
    columns = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    for shift in far:
        others = {name: [[-210.0 + shift + value for value in far]] * 4 for name in columns}
        advantages = [[value] * 4 for value in (-1.0, 0.0, 1.0, -1.0)]
        data = batch([[1, 1, 1, 0]] * 4, [1, 1, 1, 0], advantages=advantages, **others)
        logprobs = torch.full((4, 4), -210.0, requires_grad=True)
        loss, metrics = pg(**options)(logprobs, data, *counts(data))
        loss.backward()
        assert logprobs.grad.isfinite().all()
        assert all(math.isfinite(float(value)) for value in (loss.detach(), *metrics.values())), metrics


def test_kl_term_is_added_with_its_weight():
    data = batch([[1, 1]], [1], advantages=[[0.0, 0.0]], reference_policy_logprobs=[[-1.5, -1.0]])
    loss, metrics = pg(kl_coef=0.1, kl_estimator="k2")(torch.tensor([[-1.0, -1.0]]), data, *counts(data))
    assert loss.item() == pytest.approx(0.1 * 0.125 / 2)
    assert metrics["kl"].item() == pytest.approx(0.125 / 2)


@pytest.mark.parametrize(
    ("level", "entropy"), [("token", (0.5 + 1.0 + 3.0) / 3), ("sequence", ((0.5 + 1.0) / 2 + 3.0) / 2)]
)
def test_entropy_is_subtracted_with_the_mean_of_the_loss(level, entropy):
    data = batch([[1, 1], [0, 1]], [1, 1], advantages=[[0.0, 0.0]] * 2)
    data["entropy"] = torch.tensor([[0.5, 1.0], [9.0, 3.0]], requires_grad=True)
    loss_fn = pg(level=level, entropy_coef=0.1)
    assert loss_fn.entropy_gradient
    assert not pg(level=level).entropy_gradient
    loss, metrics = loss_fn(torch.full((2, 2), -1.0), data, *counts(data))
    assert loss.item() == pytest.approx(-0.1 * entropy)
    [gradient] = torch.autograd.grad(loss, data["entropy"])
    shares = [[1 / 3, 1 / 3], [0.0, 1 / 3]] if level == "token" else [[0.25, 0.25], [0.0, 0.5]]
    torch.testing.assert_close(gradient, -0.1 * torch.tensor(shares))
    assert metrics["entropy"].item() == pytest.approx(1.5)  # the mean over tokens, and no part of the gradient
    assert not metrics["entropy"].requires_grad


def test_importance_correction_is_truncated():
    data = batch([[1, 1]], [1], advantages=[[1.0, 1.0]], generation_logprobs=[[-1.0 - math.log(3), -1.0 + math.log(2)]])
    logprobs = torch.tensor([[-1.0, -1.0]])
    plain, metrics = pg()(logprobs, data, *counts(data))
    options = {"importance_correction": "truncated", "importance_cap": 2.0, "mismatch_bound": 1.0}
    corrected, more = pg(**options)(logprobs, data, *counts(data))
    assert plain.item() == pytest.approx(-1.0)
    assert corrected.item() == pytest.approx(-(2.0 + 0.5) / 2)  # weights 3 -> 2, and 1/2
    assert metrics["generation_logprob_difference"].item() == pytest.approx((math.log(3) + math.log(2)) / 2)
    assert metrics["generation_kl"].item() == pytest.approx((3 - math.log(3) - 1 + 0.5 + math.log(2) - 1) / 2)
    assert metrics["generation_logprob_difference_max"].item() == pytest.approx(math.log(3))
    assert metrics["generation_logprob_beyond_fraction"].item() == 1.0  # the default bound is 0.1
    assert more["generation_logprob_beyond_fraction"].item() == 0.5  # log 3 is beyond 1, log 2 is not
    assert more["importance_truncated_fraction"].item() == pytest.approx(0.5)


def test_mismatch_counts_completions_of_valid_rows_only():
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    difference = torch.tensor([[9.0, 0.5, -0.25], [9.0, 9.0, 0.0]]) * mask
    metrics = mismatch_metrics(difference, mask, torch.tensor(4.0), bound=0.25)  # another rank has the fourth token
    found = {name.removeprefix("generation_"): value.item() for name, value in metrics.items()}
    kl = math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75
    assert found == pytest.approx(
        {
            "kl": kl / 4,
            "logprob_difference": 0.75 / 4,
            "logprob_difference_max": 0.5,
            "logprob_beyond_fraction": 1 / 4,
        }
    )


LOSSES: list[LossFunction] = [NLLLoss(), pg(), pg(level="sequence", kl_coef=0.2, importance_correction="truncated")]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(loss_fn=st.sampled_from(LOSSES), cut=st.integers(1, 5), seed=st.integers(0, 1000))
def test_the_sum_over_microbatches_is_the_loss_of_the_batch(loss_fn, cut, seed):
    generator = torch.Generator().manual_seed(seed)

    def numbers() -> torch.Tensor:
        return torch.randn(6, 5, generator=generator, dtype=torch.float64)

    names = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    data: BatchedDataDict[Any] = BatchedDataDict({name: numbers() for name in names})
    data["token_mask"] = (numbers() > 0).double()
    data["sample_mask"] = (torch.rand(6, generator=generator) > 0.3).double()
    logprobs, totals = numbers()[:, 1:], counts(data)
    whole, whole_metrics = loss_fn(logprobs, data, *totals)
    parts = [loss_fn(logprobs[i : i + cut], data.slice(i, min(i + cut, 6)), *totals) for i in range(0, 6, cut)]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    for name, value in whole_metrics.items():
        combine = max if name.endswith("_max") else sum
        torch.testing.assert_close(
            torch.as_tensor(combine([float(metrics[name]) for _, metrics in parts])), torch.as_tensor(float(value))
        )
