"""Losses on preferences against the formulas of their papers, written out pair by pair in float64; values worked out by
hand for what other trainers define under the same names; and the policy that DPO converges to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework_preferences.config import (
    DPOConfig,
    IPOConfig,
    KTOConfig,
    ORPOConfig,
    PairwiseConfig,
    SimPOConfig,
)
from rlframework_preferences.preference_losses import KTOLoss, PairLoss

PAIRS, WIDTH = 5, 8


def random_batch(seed: int = 0) -> tuple[Tensor, BatchedDataDict[Any]]:
    """Log-probabilities `[B, S-1]` with gradient, and rows in random order of five pairs, one of them masked out.

    Answers begin at different positions. Values outside of them must not be read.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(2 * PAIRS, WIDTH, generator=generator, dtype=torch.float64)

    starts = torch.randint(1, 4, (2 * PAIRS, 1), generator=generator)
    ends = starts + torch.randint(1, 5, (2 * PAIRS, 1), generator=generator)
    mask = ((torch.arange(WIDTH) >= starts) & (torch.arange(WIDTH) < ends)).double()
    pairs = torch.arange(2 * PAIRS) // 2
    data = {
        "token_mask": mask,
        "sample_mask": (pairs != 2).double(),
        "group_ids": torch.tensor([40, 7, 300, -2, 8])[pairs],
        "chosen": (torch.arange(2 * PAIRS) % 2 == 0).double(),
        "reference_policy_logprobs": torch.where(mask > 0, uniform(-2.0, -0.05), 0.0),
        "kl_estimate": torch.full((2 * PAIRS,), 0.3, dtype=torch.float64),
        "chosen_tokens": (mask[0::2] * (pairs[0::2] != 2)[:, None]).sum().expand(2 * PAIRS),
    }
    order = torch.randperm(2 * PAIRS, generator=generator)
    logprobs = torch.where(mask > 0, uniform(-2.0, -0.05), 77.0)[order, 1:]
    return logprobs.requires_grad_(), BatchedDataDict({name: value[order] for name, value in data.items()})


def counts(data: BatchedDataDict[Any]) -> tuple[Tensor, Tensor]:
    return data["sample_mask"].sum(), (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()


def answers(logprobs: Tensor, data: BatchedDataDict[Any]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """The log-probabilities of the tokens of the chosen and of the rejected answer of each pair that counts."""
    found: dict[tuple[int, float], list[Tensor]] = {}
    for row in range(len(logprobs)):
        if data["sample_mask"][row]:
            key = (int(data["group_ids"][row]), float(data["chosen"][row]))
            found[key] = [logprobs[row, i] for i in range(WIDTH - 1) if data["token_mask"][row, i + 1]]
    return [(tokens, found[group, 0.0]) for (group, chosen), tokens in sorted(found.items()) if chosen]


# -- the papers, with pi(y|x) the product of token probabilities ------------------------------------------------------

Pair = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
"""Log-probabilities of tokens: chosen and rejected under the policy, chosen and rejected under the reference."""


def sigmoid(value: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-value))


def probability(tokens: list[Tensor]) -> Tensor:
    return torch.stack(tokens).exp().prod()


def log_ratios(pair: Pair) -> tuple[Tensor, Tensor]:
    won, lost, won_reference, lost_reference = map(probability, pair)
    return torch.log(won / won_reference), torch.log(lost / lost_reference)


def mean_logprob(tokens: list[Tensor]) -> Tensor:
    return torch.log(probability(tokens)) / len(tokens)


def dpo(pair: Pair, beta: float = 0.1, error: float = 0.0) -> Tensor:
    """arXiv:2305.18290, eq. 7; with `error`, the expectation over flipped labels of its appendix on cDPO."""
    won, lost = log_ratios(pair)
    right = sigmoid(beta * won - beta * lost)
    return -(1 - error) * torch.log(right) - error * torch.log(1 - right)


def robust_dpo(pair: Pair, error: float, beta: float = 0.1) -> Tensor:
    """arXiv:2403.00409, eq. 12."""
    won, lost, *references = pair
    flipped = (lost, won, references[1], references[0])
    return ((1 - error) * dpo(pair, beta) - error * dpo(flipped, beta)) / (1 - 2 * error)


def ipo(pair: Pair, tau: float) -> Tensor:
    """arXiv:2310.12036, eq. 17."""
    won, lost, won_reference, lost_reference = map(probability, pair)
    return (torch.log(won * lost_reference / (lost * won_reference)) - 1 / tau / 2) ** 2


def simpo(pair: Pair, beta: float, gamma: float) -> Tensor:
    """arXiv:2405.14734, eq. 6."""
    return -torch.log(sigmoid(beta * mean_logprob(pair[0]) - beta * mean_logprob(pair[1]) - gamma))


def orpo(pair: Pair, weight: float) -> Tensor:
    """arXiv:2403.07691, eq. 3 to 7."""
    won, lost = (torch.exp(mean_logprob(tokens)) for tokens in pair[:2])
    ratio = (won / (1 - won)) / (lost / (1 - lost))
    return -mean_logprob(pair[0]) - weight * torch.log(sigmoid(torch.log(ratio)))


def nll(pair: Pair) -> Tensor:
    return -torch.log(probability(pair[0]))


CASES: dict[str, tuple[PairwiseConfig, Callable[[Pair], Tensor]]] = {
    "dpo": (DPOConfig(), dpo),
    "dpo-beta": (DPOConfig(beta=0.7, weight=2.0), lambda pair: 2 * dpo(pair, 0.7)),
    "cdpo": (DPOConfig(label_smoothing=0.2), lambda pair: dpo(pair, error=0.2)),
    "robust": (DPOConfig(label_smoothing=0.2, smoothing="robust"), lambda pair: robust_dpo(pair, 0.2)),
    "rpo": (DPOConfig(sft_weight=0.5), lambda pair: dpo(pair) + 0.5 * nll(pair) / len(pair[0])),
    "dpo-sft-sum": (DPOConfig(sft_weight=0.5, sft_mean="sum"), lambda pair: dpo(pair) + 0.5 * nll(pair)),
    "ipo": (IPOConfig(beta=0.4), lambda pair: ipo(pair, 0.4)),
    "simpo": (SimPOConfig(beta=2.5, gamma=0.8), lambda pair: simpo(pair, 2.5, 0.8)),
    "orpo": (ORPOConfig(weight=0.25), lambda pair: orpo(pair, 0.25)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_losses_of_pairs_are_those_of_their_papers(case: str, seed: int) -> None:
    config, formula = CASES[case]
    logprobs, data = random_batch(seed)
    loss, metrics = PairLoss(config.pair_loss())(logprobs, data, *counts(data))
    loss.backward()
    given, logprobs.grad = logprobs.grad, None
    pairs = [
        (*own, *reference)
        for own, reference in zip(
            answers(logprobs, data), answers(data["reference_policy_logprobs"][:, 1:], data), strict=True
        )
    ]
    expected = sum(formula(pair) for pair in pairs) / len(pairs)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(given, logprobs.grad, rtol=1e-9, atol=1e-12)
    assert metrics["num_valid_samples"] == 2 * (PAIRS - 1)


def test_the_sft_term_over_tokens_is_that_of_supervised_training_on_the_chosen_answers() -> None:
    logprobs, data = random_batch()
    config = DPOConfig(weight=0.0, sft_weight=1.0, sft_mean="token").pair_loss()
    loss, metrics = PairLoss(config)(logprobs, data, *counts(data))
    tokens = torch.stack([value for chosen, _ in answers(logprobs, data) for value in chosen])
    assert loss.item() == pytest.approx(-tokens.mean().item(), rel=1e-9)
    assert metrics["sft_loss"].item() == pytest.approx(loss.item())


@pytest.mark.parametrize("seed", [0, 1])
def test_kto_is_that_of_its_paper(seed: int) -> None:
    config = KTOConfig(beta=0.4, desirable_weight=1.5, undesirable_weight=0.7)
    logprobs, data = random_batch(seed)
    loss, metrics = KTOLoss(config)(logprobs, data, *counts(data))
    loss.backward()
    given, logprobs.grad = logprobs.grad, None
    values = []
    for own, reference in zip(
        answers(logprobs, data), answers(data["reference_policy_logprobs"][:, 1:], data), strict=True
    ):
        won, lost = log_ratios((*own, *reference))
        values += [1.5 - 1.5 * sigmoid(0.4 * (won - 0.3)), 0.7 - 0.7 * sigmoid(0.4 * (0.3 - lost))]  # eq. 8
    expected = sum(values) / len(values)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(given, logprobs.grad, rtol=1e-9, atol=1e-12)
    assert metrics["kl_estimate"].item() == pytest.approx(0.3, rel=1e-6)


@pytest.mark.parametrize("case", [*CASES, "kto"])
def test_microbatches_add_up_to_the_global_batch(case: str) -> None:
    loss_fn = KTOLoss(KTOConfig()) if case == "kto" else PairLoss(CASES[case][0].pair_loss())
    logprobs, data = random_batch(3)
    whole, metrics = loss_fn(logprobs, data, *counts(data))
    groups = data["group_ids"].unique().tolist()
    total, sums = 0.0, dict.fromkeys(metrics, 0.0)
    for chosen in (
        groups[:1],
        groups[1:4],
        groups[4:],
    ):  # the first has one pair, the second the masked one among three
        rows = torch.tensor([row for row, group in enumerate(data["group_ids"].tolist()) if group in chosen])
        part = BatchedDataDict({name: value[rows] for name, value in data.items()})
        loss, found = loss_fn(logprobs[rows], part, *counts(data))
        total += loss.item()
        sums = {name: value + float(found[name]) for name, value in sums.items()}
    assert total == pytest.approx(whole.item(), rel=1e-12)
    assert sums == pytest.approx({name: float(value) for name, value in metrics.items()}, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_without_a_pair_have_no_loss_but_a_gradient(rows: int) -> None:
    """A rank may have a microbatch of rows that are masked out; backward must work there too."""
    logprobs, data = random_batch()
    data = BatchedDataDict({name: value[:rows].clone() for name, value in data.items()})
    data["sample_mask"].zero_()
    kept = logprobs.detach()[:rows].clone().requires_grad_()
    one = torch.tensor(2.0)
    loss, metrics = PairLoss(ORPOConfig().pair_loss())(kept, data, one, one)
    loss.backward()
    assert loss.item() == 0.0
    assert kept.grad is not None
    assert kept.grad.eq(0).all()
    assert metrics["accuracy"] == 0


def test_metrics_are_means_over_pairs() -> None:
    data = pairs_of_sums([(3.0, 1.0), (-2.0, 0.0), (1.0, 1.0)])
    _, metrics = PairLoss(DPOConfig(beta=0.5).pair_loss())(data.pop("logprobs"), data, *counts(data))
    assert {name: metrics[name].item() for name in ("accuracy", "margin", "chosen_reward", "rejected_reward")} == {
        "accuracy": 0.5,  # right, wrong, equal
        "margin": 0.0,
        "chosen_reward": pytest.approx(0.5 * 2 / 3),
        "rejected_reward": pytest.approx(0.5 * 2 / 3),
    }


def test_an_answer_of_probability_one_has_finite_odds() -> None:
    data = pairs_of_sums([(0.0, -1.0)])
    logprobs = data.pop("logprobs").float().requires_grad_()
    loss, _ = PairLoss(ORPOConfig().pair_loss())(logprobs, data, *counts(data))
    loss.backward()
    assert math.isfinite(loss.item())
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


# -- definitions of other trainers: numbers worked out by hand --------------------------------------------------------


def pairs_of_sums(sums: list[tuple[float, float]], lengths: tuple[int, int] = (1, 1)) -> BatchedDataDict[Any]:
    """Pairs of answers with these `lengths`, and sums of log-ratios to a reference of probability 1."""
    total = torch.tensor(sums, dtype=torch.float64).flatten()
    size = torch.tensor(lengths * len(sums))
    mask = (torch.arange(6) < size[:, None]).double()
    rows = torch.arange(len(total))
    lead = torch.zeros(len(total), 1, dtype=torch.float64)
    return BatchedDataDict(
        {
            "logprobs": mask * (total / size)[:, None],
            "token_mask": torch.cat([lead, mask], 1),
            "reference_policy_logprobs": torch.zeros(len(total), 7, dtype=torch.float64),
            "sample_mask": torch.ones(len(total), dtype=torch.float64),
            "group_ids": rows // 2,
            "chosen": (rows % 2 == 0).double(),
            "chosen_tokens": size[0::2].sum().expand(len(total)),
        }
    )


BY_HAND: dict[str, tuple[PairwiseConfig, float]] = {
    # answers of 2 and 4 tokens with log-ratios -1 and -3: sums differ by 2, means by -0.5 + 0.75 = 0.25
    "ipo": (IPOConfig(beta=0.5), 1.0),  # (2 - 1)^2
    "ipo-trl": (IPOConfig(preset="trl", beta=0.5), 0.5625),  # (0.25 - 1)^2
    "ipo-trl-overridden": (IPOConfig(preset="trl", beta=0.5, length_mean=False), 1.0),
    "dpo": (DPOConfig(beta=0.5), 0.3132617),  # log(1 + e^-1)
    "dpo-length_mean": (DPOConfig(beta=0.5, length_mean=True), 0.6325994),  # log(1 + e^-0.125)
    # the same with labels flipped: 1.3132617 = log(1 + e)
    "cdpo": (DPOConfig(beta=0.5, label_smoothing=0.1), 0.4132617),  # 0.9 * 0.3132617 + 0.1 * 1.3132617
    "robust-trl": (DPOConfig(preset="trl", beta=0.5, label_smoothing=0.1), 0.1882617),  # (0.2819355 - 0.1313262) / 0.8
    # SFT terms with weight 1: sum 1, mean over the answer 0.5
    "sft": (DPOConfig(beta=0.5, sft_weight=1.0), 0.8132617),
    "sft-nemo_rl": (DPOConfig(preset="nemo_rl", beta=0.5, sft_weight=1.0), 1.3132617),
    "nemo_rl": (DPOConfig(preset="nemo_rl"), 0.6443967),  # log(1 + e^-0.1): beta 0.05
    "simpo": (SimPOConfig(), 0.9740770),  # log(1 + e^0.5): 2 * 0.25 - 1 = -0.5
    "simpo-trl": (SimPOConfig(preset="trl"), 0.9585891),  # log(1 + e^0.475): 0.1 * 0.25 - 0.5 = -0.475
}


@pytest.mark.parametrize("case", BY_HAND)
def test_presets_by_hand(case: str) -> None:
    config, expected = BY_HAND[case]
    data = pairs_of_sums([(-1.0, -3.0)], lengths=(2, 4))
    loss, _ = PairLoss(config.pair_loss())(data.pop("logprobs"), data, *counts(data))
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_the_sft_mean_over_tokens_weighs_long_answers_more() -> None:
    data = pairs_of_sums([(-1.0, -3.0), (-4.0, -3.0)], lengths=(2, 4))
    data["token_mask"][2, 2:] = 0  # the second chosen answer has one token, of log-probability -2
    data["chosen_tokens"] = torch.full((4,), 3.0)
    losses = {}
    for preset in ("paper", "trl", "nemo_rl"):
        config = DPOConfig(preset=preset, weight=0.0, sft_weight=1.0)
        losses[preset] = PairLoss(config.pair_loss())(data["logprobs"], data, *counts(data))[0].item()
    assert losses == pytest.approx({"paper": (0.5 + 2) / 2, "trl": (1 + 2) / 3, "nemo_rl": (1 + 2) / 2}, rel=1e-12)


# -- closed form ------------------------------------------------------------------------------------------------------


def test_dpo_converges_to_the_reference_times_the_exponential_of_the_reward() -> None:
    """A table of probabilities, trained on all pairs with the preferences of Bradley and Terry, which weigh each pair.

    Its optimum is proportional to pi_ref exp(r / beta), eq. 4 of arXiv:2305.18290.
    """
    beta, answers_count = 0.5, 4
    rewards = torch.tensor([0.3, -0.4, 0.9, 0.0], dtype=torch.float64)
    reference = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()
    ordered = [(won, lost) for won in range(answers_count) for lost in range(answers_count) if won != lost]
    rows = torch.tensor(ordered).flatten()
    weights = sigmoid(rewards[rows[0::2]] - rewards[rows[1::2]])  # p(won > lost)
    data = BatchedDataDict(
        {
            "token_mask": torch.tensor([[0.0, 1.0]]).double().expand(len(rows), 2),
            "sample_mask": weights.repeat_interleave(2),
            "group_ids": torch.arange(len(rows)) // 2,
            "chosen": (torch.arange(len(rows)) % 2 == 0).double(),
            "reference_policy_logprobs": torch.stack([torch.zeros_like(reference), reference], 1)[rows],
        }
    )
    table = reference.clone().requires_grad_()
    loss_fn, total = PairLoss(DPOConfig(beta=beta).pair_loss()), counts(data)
    optimizer = torch.optim.LBFGS(
        [table], max_iter=500, tolerance_grad=1e-14, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss, _ = loss_fn(table.log_softmax(0)[rows][:, None], data, *total)
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    optimum = (reference + rewards / beta).softmax(0)
    torch.testing.assert_close(table.detach().softmax(0), optimum, rtol=1e-6, atol=0)
    assert (optimum - reference.exp()).abs().max() > 0.1
