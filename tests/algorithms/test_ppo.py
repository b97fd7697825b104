"""PPO's advantages, value loss and presets against their formulas, written out in float64 loops."""

from __future__ import annotations

import math
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from rlframework.algorithms.advantages import generalized_advantages, token_advantages
from rlframework.algorithms.grpo import policy_loss
from rlframework.algorithms.losses import ValueLoss
from rlframework.algorithms.ppo import add_advantages, value_metrics
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithm_presets import PRESETS
from rlframework.config.algorithms import PPOConfig, ValueLossConfig
from rlframework.rollout.result import Rollout

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "algorithms" / "ppo.md"


def recursion(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A(t) = delta(t) + gamma lam A(t + 1), from the end."""
    found, after, following = [0.0] * len(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        after = rewards[t] + gamma * following - values[t] + gamma * lam * after
        following = values[t]
        found[t] = after
    return found


@pytest.mark.parametrize("length", [1, 2, 3, 8, 37])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.9, 0.0), (0.0, 1.0)])
def test_advantages_are_those_of_the_recursion(length: int, gamma: float, lam: float) -> None:
    rewards, values = torch.randn(2, 3, length, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = generalized_advantages(rewards, values, gamma, lam)
    for row in range(3):
        wanted = recursion(rewards[row].tolist(), values[row].tolist(), gamma, lam)
        assert found[row].tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def test_long_completions_lose_no_digits() -> None:
    """0.9 to the power of the length is 0 in fp64."""
    rewards, values = torch.randn(2, 1, 20_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    wanted = recursion(rewards[0].tolist(), values[0].tolist(), 1.0, 0.9)
    assert generalized_advantages(rewards, values, 1.0, 0.9)[0].tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_the_sampled_tokens_of_an_episode_are_its_time_steps() -> None:
    """Episode 0 has two rows with an observation between its tokens, 1 has no sampled token, 2 has one."""
    mask = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]).float()
    values = torch.tensor([[9, 1, 9, 2, 3], [9, 9, 4, 9, 9], [9, 9, 9, 9, 9], [9, 5, 9, 9, 9]]).float()
    penalty = torch.tensor([[7, 0.5, 7, 0, 1], [7, 7, 0.25, 7, 7], [7, 7, 7, 7, 7], [7, 2, 7, 7, 7]]).float()
    episode_of, rewards = torch.tensor([0, 0, 1, 2]), torch.tensor([8.0, 100.0, 6.0])
    options = {"gamma": 0.9, "lam": 0.8}
    advantages, returns = token_advantages(rewards, values, mask, episode_of, **options, penalty=penalty)
    first = recursion([-0.5, 0.0, -1.0, 8.0 - 0.25], [1.0, 2.0, 3.0, 4.0], 0.9, 0.8)
    assert advantages[mask != 0].tolist() == pytest.approx([*first, 6.0 - 2.0 - 5.0], rel=1e-6)
    targets = [advantage + value for advantage, value in zip(first, (1.0, 2.0, 3.0, 4.0), strict=True)]
    assert returns[mask != 0].tolist() == pytest.approx([*targets, 4.0], rel=1e-6)
    assert advantages[mask == 0].abs().sum() == returns[mask == 0].abs().sum() == 0.0
    assert advantages.dtype == returns.dtype == torch.float32
    bare, _ = token_advantages(rewards, values, mask, episode_of, **options)
    assert bare[3, 1] == 1.0


# -- the loss of the critic --------------------------------------------------------------------------------------------


def of_values(values: list[float], earlier: list[float], returns: list[float], **keys: Any) -> tuple[float, Any, Any]:
    """The loss of one row of tokens, its gradient, and its metrics."""
    predicted = torch.tensor([values], dtype=torch.float64, requires_grad=True)
    column = torch.full((1, 1), 99.0, dtype=torch.float64)
    data: BatchedDataDict[Any] = BatchedDataDict(
        {
            "token_mask": torch.ones(1, len(values) + 1, dtype=torch.float64),
            "sample_mask": torch.ones(1, dtype=torch.float64),
            "values": torch.cat((column, torch.tensor([earlier], dtype=torch.float64)), 1),
            "returns": torch.cat((column, torch.tensor([returns], dtype=torch.float64)), 1),
        }
    )
    data["token_mask"][0, -1] = 0.0
    loss, metrics = ValueLoss(ValueLossConfig(**keys))(predicted, data, torch.tensor(1.0), torch.tensor(4.0))
    return loss.item(), torch.autograd.grad(loss, predicted)[0][0].tolist(), metrics


VALUES, EARLIER, RETURNS = [1.0, 1.5, 0.1, 2.0, 50.0], [1.0, 1.0, 1.0, 1.0, 0.0], [3.0, 1.8, 2.0, 0.0, 0.0]
"""Unchanged; moved beyond the bound towards its return; away from it; beyond it; and a token that does not count."""


def test_the_loss_without_a_bound() -> None:
    loss, gradient, metrics = of_values(VALUES, EARLIER, RETURNS, clip=None, coef=3.0)
    assert loss == pytest.approx(3.0 * (4.0 + 0.09 + 3.61 + 4.0) / 8)
    assert gradient == pytest.approx([3.0 * error / 4 for error in (-2.0, -0.3, -1.9, 2.0)] + [0.0])
    assert metrics["value_loss"].item() == pytest.approx(11.7 / 8)
    assert set(metrics) == {"value_loss", "num_valid_samples"}


def test_the_loss_with_a_bound() -> None:
    """1.5 counts as 1.2, which is further from 1.8; the others moved away, so that their own losses are larger."""
    loss, gradient, metrics = of_values(VALUES, EARLIER, RETURNS, clip=0.2)
    assert loss == pytest.approx((4.0 + 0.36 + 3.61 + 4.0) / 8)
    assert gradient == pytest.approx([-2.0 / 4, 0.0, -1.9 / 4, 2.0 / 4, 0.0])
    assert metrics["value_clip_fraction"].item() == pytest.approx(1 / 4)


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 2.0, 4.0])
    assert value_metrics(returns, returns)["train/explained_variance"] == 1.0
    assert value_metrics(torch.full((3,), 7.0), returns)["train/explained_variance"] == 0.0
    assert value_metrics(returns / 2, returns)["train/explained_variance"] == pytest.approx(0.75)
    assert value_metrics(returns, torch.ones(3)) == {
        "train/value": 2.0,
        "train/return": 1.0,
        "train/explained_variance": 0.0,
    }
    assert value_metrics(returns[:0], returns[:0]) == {}


# -- presets -----------------------------------------------------------------------------------------------------------

LENGTHS, REWARDS = [5, 3, 1, 4], [1.0, 0.0, 2.0, -1.0]
ROWS, WIDTH, TOTAL = len(LENGTHS), max(LENGTHS), sum(LENGTHS)


class Numbers:
    """Four completions with ratios and values on both sides of every clip range."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)

        def normal(scale: float) -> Tensor:
            return scale * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

        self.p = -1.0 - normal(0.5).abs()
        self.old = self.p + normal(0.3)
        self.old[1, :2] = self.p[1, :2] - torch.tensor([3.5, 12.0]).double().log()
        self.ref = self.old + normal(0.4)
        self.values, self.later = normal(1.0), normal(0.5)
        self.later += self.values
        self.mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).double()

    def rollout(self) -> Rollout:
        lead = torch.full((ROWS, 1), 99.0, dtype=torch.float64)
        columns = {"prev_logprobs": self.old, "reference_policy_logprobs": self.ref, "values": self.values}
        data: BatchedDataDict[Any] = BatchedDataDict(
            {name: torch.cat((lead, values), 1) for name, values in columns.items()}
            | {
                "token_mask": torch.cat((torch.zeros(ROWS, 1), self.mask), 1).double(),
                "sample_mask": torch.ones(ROWS, dtype=torch.float64),
            }
        )
        none, rewards = torch.zeros(ROWS, dtype=torch.bool), torch.tensor(REWARDS, dtype=torch.float64)
        samples: list[Any] = [None] * ROWS
        episodes, lengths = torch.arange(ROWS), torch.tensor(LENGTHS)
        return Rollout(samples, [""] * ROWS, data, rewards, rewards, lengths, none, {}, episodes, none.clone())


CASES = {
    "paper": {"lam": 0.95, "kl": 0.0, "sample": False, "high": 0.2, "dual": None, "clip": 0.2, "coef": 1.0},
    "trl": {"lam": 0.95, "kl": 0.05, "sample": True, "high": 0.2, "dual": None, "clip": 0.2, "coef": 0.1},
    "verl": {"lam": 1.0, "kl": 0.0, "sample": True, "high": 0.2, "dual": 3.0, "clip": 0.5, "coef": 1.0},
    "nemo_rl": {"lam": 0.95, "kl": 0.0, "sample": True, "high": 0.28, "dual": 10.0, "clip": 0.2, "coef": 0.4},
}


def wanted_losses(n: Numbers, case: dict[str, Any]) -> tuple[float, list[float], float, list[float]]:
    """The loss of the policy and that of the critic, each with its gradient by the tokens in order."""
    advantages, returns = list[float](), list[float]()
    for i, length in enumerate(LENGTHS):
        rewards = [-case["kl"] * float(n.old[i, t] - n.ref[i, t]) for t in range(length)]
        rewards[-1] += REWARDS[i]
        values = n.values[i, :length].tolist()
        found = recursion(rewards, values, 1.0, case["lam"])
        advantages += found
        returns += [a + v for a, v in zip(found, values, strict=True)]
    squares = sum((a - mean(advantages)) ** 2 for a in advantages)
    deviation = math.sqrt(squares / (TOTAL - 1) + 1e-8 if case["sample"] else squares / TOTAL)
    places = [(i, t) for i, length in enumerate(LENGTHS) for t in range(length)]
    loss, slopes, value_loss, value_slopes = 0.0, [], 0.0, []
    for (i, t), advantage, target in zip(places, advantages, returns, strict=True):
        a, r = (advantage - mean(advantages)) / deviation, math.exp(float(n.p[i, t] - n.old[i, t]))
        bounded = min(max(r, 0.8), 1.0 + case["high"])
        token, slope = (-bounded * a, 0.0) if bounded * a < r * a else (-r * a, -r * a)
        if case["dual"] and a < 0 and r > case["dual"]:
            token, slope = -case["dual"] * a, 0.0
        loss, slopes = loss + token / TOTAL, [*slopes, slope / TOTAL]
        value, earlier = float(n.later[i, t]), float(n.values[i, t])
        limited = min(max(value, earlier - case["clip"]), earlier + case["clip"])
        beyond = (limited - target) ** 2 > (value - target) ** 2
        value_loss += case["coef"] * max((limited - target) ** 2, (value - target) ** 2) / (2 * TOTAL)
        value_slopes.append(0.0 if beyond else case["coef"] * (value - target) / TOTAL)
    return loss, slopes, value_loss, value_slopes


@pytest.mark.parametrize("preset", CASES)
def test_a_preset_is_its_formula(preset: str) -> None:
    n, config = Numbers(), PPOConfig(name="ppo", preset=preset)
    result, mask = n.rollout(), n.mask != 0
    metrics = add_advantages(result, config, 16)
    loss, slopes, value_loss, value_slopes = wanted_losses(n, CASES[preset])
    p, later, counts = n.p.clone().requires_grad_(), n.later.clone().requires_grad_(), torch.tensor([ROWS, TOTAL])
    found, _ = policy_loss(config, 16)(p, result.data, *counts)
    assert found.item() == pytest.approx(loss, rel=1e-9)
    assert torch.autograd.grad(found, p)[0][mask].tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    found, more = ValueLoss(config.value_loss)(later, result.data, *counts)
    assert found.item() == pytest.approx(value_loss, rel=1e-9)
    assert torch.autograd.grad(found, later)[0][mask].tolist() == pytest.approx(value_slopes, rel=1e-9, abs=1e-12)
    assert 0 < more["value_clip_fraction"] < 1
    assert metrics["train/return"] == pytest.approx(float(result.data["returns"][:, 1:][mask].mean()))


def test_without_a_preset_it_is_the_paper() -> None:
    assert set(CASES) == set(PRESETS["ppo"])
    paper = PPOConfig(name="ppo", preset="paper")
    assert PPOConfig() == PPOConfig(name="ppo") == paper.model_copy(update={"preset": None})


def test_the_settings_on_the_page_are_those_of_the_presets() -> None:
    page = PAGE.read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```yaml\n# preset: (\w+)\n(.*?)```", page, re.DOTALL))
    assert set(blocks) == set(CASES)
    for preset, text in blocks.items():
        shown = PPOConfig(**yaml.safe_load(text)["algorithm"])
        assert shown.model_copy(update={"preset": preset}) == PPOConfig(name="ppo", preset=preset), preset


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"group_baseline": True}, "group_baseline"),
        ({"normalize_std": "batch"}, "normalize_std"),
        ({"reward_kl": {"spread": "to_go"}}, "spread"),
        ({"gae_lambda": 1.1}, "gae_lambda"),
        ({"samples_per_prompt": 2, "leave_one_out": True}, "leave_one_out is a baseline"),
    ],
)
def test_settings_that_ppo_does_not_have(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**keys)
