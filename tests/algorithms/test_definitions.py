"""Definitions of TRL, verl, NeMo-RL and transformers, written out from their formulas, against ours with the settings
that docs/definitions.md names. Each case is a row of that page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from rlframework.algorithms.advantages import group_advantages
from rlframework.algorithms.losses import ClippedPGLoss, NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithm_presets import PRESETS
from rlframework.config.algorithms import ClippedPGLossConfig, GRPOConfig
from rlframework.config.policy import OptimizerConfig, SchedulerConfig
from rlframework.policy.head.logprobs import chunked_logprobs
from rlframework.policy.optimization import learning_rate, parameter_groups

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "definitions.md"
ROWS, WIDTH = 6, 7


class Numbers:
    """A batch of six rows of up to seven completion tokens. Some ratios are far outside the clip range."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)

        def normal(scale: float) -> Tensor:
            return scale * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

        self.current = (-1.0 - normal(0.5).abs()).requires_grad_()
        self.old = self.current.detach() + normal(0.4)
        self.old[0, 0] -= 25.0  # a log-ratio of 25, beyond verl's clamp, at a negative advantage
        self.old[5, :3] = self.current.detach()[5, :3] - torch.tensor([1.24, 1.6, 0.7]).double().log()
        self.reference = self.current.detach() + normal(0.6)
        self.reference[1, :3] = self.current.detach()[1, :3] + torch.tensor([3.0, 25.0, 100.0]).double()
        self.reference[2, 0] -= 25.0
        self.generator = self.old + normal(0.5)
        self.advantages = normal(1.0)[:, :1].expand(-1, WIDTH).clone()
        self.advantages[0], self.advantages[5] = -0.9, 1.1
        self.mask = (torch.arange(WIDTH) < torch.tensor([7, 5, 4, 1, 6, 3])[:, None]).double()

    def columns(self, *names: str) -> BatchedDataDict[Any]:
        """The rows as our losses take them: a leading position, which is a prompt's, is never read."""
        ours = {
            "prev_logprobs": self.old,
            "reference_policy_logprobs": self.reference,
            "generation_logprobs": self.generator,
            "advantages": self.advantages,
            "token_mask": self.mask,
        }
        lead = torch.full((ROWS, 1), 99.0, dtype=torch.float64)
        found = {name: torch.cat((lead, ours[name]), 1) for name in ("advantages", "token_mask", *names)}
        return BatchedDataDict({**found, "sample_mask": torch.ones(ROWS, dtype=torch.float64)})

    def token_mean(self, values: Tensor) -> Tensor:
        return (values * self.mask).sum() / self.mask.sum()

    def sequence_mean(self, values: Tensor) -> Tensor:
        return ((values * self.mask).sum(1) / self.mask.sum(1)).mean()


def ours(numbers: Numbers, *columns: str, **settings: Any) -> Tensor:
    """The loss with `settings`, which must make a valid configuration."""
    config = GRPOConfig(loss=ClippedPGLossConfig(**settings)).loss
    assert isinstance(config, ClippedPGLossConfig)
    data = numbers.columns(*columns)
    tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
    return ClippedPGLoss(config)(numbers.current, data, data["sample_mask"].sum(), tokens)[0]


def k3(difference: Tensor) -> Tensor:
    return difference.exp() - difference - 1


# -- the policy loss ---------------------------------------------------------------------------------------------------


def trl(
    numbers: Numbers, *, beta: float = 0.0, corrects_kl: bool = True, delta: float | None = None, high: float = 0.28
) -> Tensor:
    """The loss of each token with `epsilon=0.2`, `epsilon_high=high`."""
    ratio = (numbers.current - numbers.old).exp()
    upper = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(upper * numbers.advantages, ratio.clamp(0.8, 1 + high) * numbers.advantages)
    if beta:
        kl = k3(numbers.reference - numbers.current)
        loss = loss + beta * (kl * ratio if corrects_kl else kl)
    return loss


def verl(numbers: Numbers, *, high: float = 0.28) -> Tensor:
    """The loss of each token with `clip_ratio_low=0.2`, `clip_ratio_high=high`, `clip_ratio_c=3`."""
    ratio = (numbers.current - numbers.old).clamp(-20, 20).exp()
    loss = torch.maximum(-numbers.advantages * ratio, -numbers.advantages * ratio.clamp(0.8, 1 + high))
    limited = torch.minimum(loss, -numbers.advantages * 3)
    return torch.where(numbers.advantages < 0, limited, loss)


def verl_low_var_kl(numbers: Numbers) -> Tensor:
    return k3((numbers.reference - numbers.current).clamp(-20, 20)).clamp(-10, 10)


def verl_sequence_mean(numbers: Numbers, values: Tensor) -> Tensor:
    return ((values * numbers.mask).sum(1) / (numbers.mask.sum(1) + 1e-8)).sum() / ROWS


def nemo_rl(
    numbers: Numbers,
    *,
    kl: float = 0.0,
    estimator: Callable[[Tensor], Tensor] = k3,
    generator_weights: bool = False,
    high: float = 0.28,
    ratio_clip_c: float | None = 3.0,
) -> Tensor:
    """The loss of each token with `ratio_clip_min=0.2`, `ratio_clip_max=high`."""
    ratio = (numbers.current - numbers.old).exp()
    loss = torch.maximum(-numbers.advantages * ratio, -numbers.advantages * ratio.clamp(0.8, 1 + high))
    if ratio_clip_c is not None:
        loss = torch.where(numbers.advantages < 0, torch.minimum(loss, -numbers.advantages * ratio_clip_c), loss)
    difference = numbers.reference - numbers.current
    clamped = difference.clamp(-20, 20)
    sampled = numbers.generator if generator_weights else numbers.current.detach()
    weights = (numbers.current - sampled).exp()
    weights = torch.where(difference == clamped, weights, weights.detach())
    return loss + kl * (weights * estimator(clamped)).clamp(-10, 10)


CLIP: dict[str, Any] = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28}
DUAL: dict[str, Any] = CLIP | {"ratio_clip_c": 3.0}
OLD, REFERENCE, GENERATOR = "prev_logprobs", "reference_policy_logprobs", "generation_logprobs"
WEIGHT = 0.05

LOSSES: dict[str, tuple[Callable[[Numbers], Tensor], tuple[str, ...], dict[str, Any]]] = {
    "clip-trl": (lambda n: n.token_mean(trl(n)), (OLD,), CLIP),
    "clip-verl": (lambda n: n.token_mean(verl(n)), (OLD,), DUAL),
    "clip-nemo_rl": (
        lambda n: n.token_mean(nemo_rl(n)),
        (OLD,),
        DUAL,
    ),
    "delta-trl": (lambda n: n.token_mean(trl(n, delta=4.0)), (OLD,), CLIP | {"ratio_clip_c": 4.0}),
    "sequence_mean-trl": (lambda n: n.sequence_mean(trl(n)), (OLD,), CLIP | {"level": "sequence"}),
    "sequence_mean-verl": (lambda n: verl_sequence_mean(n, verl(n)), (OLD,), DUAL | {"level": "sequence"}),
    "constant-trl": (
        lambda n: (trl(n) * n.mask).sum() / (ROWS * 16),  # max_completion_length=16
        (OLD,),
        CLIP | {"level": "constant", "constant_length": 16},
    ),
    "constant-verl": (
        lambda n: (verl(n) * n.mask).sum(1).sum() / ROWS / 16,  # loss_scale_factor=16
        (OLD,),
        DUAL | {"level": "constant", "constant_length": 16},
    ),
    "kl_correction-trl": (
        lambda n: n.token_mean(trl(small_kl(n), beta=WEIGHT)),
        (OLD, REFERENCE),
        CLIP | {"kl_coef": WEIGHT, "kl_correction": "ratio"},
    ),
    "kl-trl": (
        lambda n: n.token_mean(trl(small_kl(n), beta=WEIGHT, corrects_kl=False)),
        (OLD, REFERENCE),
        CLIP | {"kl_coef": WEIGHT},
    ),
    "kl-verl": (
        lambda n: n.token_mean(verl(n) + WEIGHT * verl_low_var_kl(n)),
        (OLD, REFERENCE),
        DUAL | {"kl_coef": WEIGHT, "kl_max": 10.0},
    ),
    "kl_k1-verl": (
        lambda n: n.token_mean(verl(n) + WEIGHT * (n.current - n.reference)),
        (OLD, REFERENCE),
        DUAL | {"kl_coef": WEIGHT, "kl_estimator": "k1"},
    ),
    "kl_k2-verl": (
        lambda n: n.token_mean(verl(n) + WEIGHT * 0.5 * (n.current - n.reference) ** 2),
        (OLD, REFERENCE),
        DUAL | {"kl_coef": WEIGHT, "kl_estimator": "k2"},
    ),
    "kl-nemo_rl": (
        lambda n: n.token_mean(nemo_rl(n, kl=WEIGHT)),
        (OLD, REFERENCE),
        DUAL | {"kl_coef": WEIGHT, "kl_max": 10.0, "kl_correction": "score"},
    ),
    "kl_k1-nemo_rl": (
        lambda n: n.token_mean(nemo_rl(n, kl=WEIGHT, estimator=torch.neg)),
        (OLD, REFERENCE),
        DUAL | {"kl_coef": WEIGHT, "kl_max": 10.0, "kl_estimator": "k1", "kl_correction": "score"},
    ),
    "kl_k2-nemo_rl": (
        lambda n: n.token_mean(nemo_rl(n, kl=WEIGHT, estimator=lambda r: r**2 / 2)),
        (OLD, REFERENCE),
        DUAL | {"kl_coef": WEIGHT, "kl_max": 10.0, "kl_estimator": "k2", "kl_correction": "score"},
    ),
    "kl_correction-nemo_rl": (
        lambda n: n.token_mean(nemo_rl(n, kl=WEIGHT, generator_weights=True)),
        (OLD, REFERENCE, GENERATOR),
        DUAL | {"kl_coef": WEIGHT, "kl_max": 10.0, "kl_correction": "generator"},
    ),
    "mismatch-trl": (
        lambda n: n.token_mean((n.old - n.generator).exp().clamp(max=3.0) * trl(n)),
        (OLD, GENERATOR),
        CLIP | {"importance_correction": "truncated", "importance_cap": 3.0},
    ),
    "mismatch-verl": (
        lambda n: n.token_mean((n.old - n.generator).clamp(-20, 20).exp().clamp(max=2.0) * verl(n)),
        (OLD, GENERATOR),
        DUAL | {"importance_correction": "truncated"},
    ),
    "mismatch-nemo_rl": (
        lambda n: n.token_mean((n.old - n.generator).exp() * nemo_rl(n)),
        (OLD, GENERATOR),
        DUAL | {"importance_correction": "truncated", "importance_cap": 1e9},
    ),
}


def small_kl(numbers: Numbers) -> Numbers:
    """The same numbers without the log-ratios whose exponential overflows; TRL does not clamp them."""
    numbers.reference[1, 2] = numbers.current.detach()[1, 2] + 2.0
    return numbers


@pytest.mark.parametrize("case", LOSSES)
def test_value_and_gradient_of_the_loss(case):
    theirs, columns, settings = LOSSES[case]
    numbers = Numbers()
    wanted = theirs(numbers)
    (gradient,) = torch.autograd.grad(wanted, numbers.current)
    found = ours(numbers, *columns, **settings)
    (own,) = torch.autograd.grad(found, numbers.current)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own, gradient, rtol=1e-6, atol=1e-6)
    assert gradient.abs().max() > 1e-3


def test_delta_of_trl_within_the_clip_range_is_rejected():
    """There TRL lowers the upper clip bound of good tokens; ours bounds bad tokens only."""
    with pytest.raises(ValueError, match=r"ratio_clip_c is 1\.1, but must be greater than 1 \+ ratio_clip_max"):
        GRPOConfig(loss=ClippedPGLossConfig(ratio_clip_c=1.1))


def test_a_row_without_tokens_counts_in_means_over_sequences():
    """As in TRL, verl and NeMo-RL; a row that is excluded by `sample_mask` does not."""
    numbers = Numbers()
    numbers.advantages = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    numbers.mask[3] = 0.0
    assert ours(numbers, level="sequence").item() == pytest.approx(-5 / 6)
    data = numbers.columns()
    data["sample_mask"][3] = 0.0
    loss = ClippedPGLoss(ClippedPGLossConfig(level="sequence"))
    assert loss(numbers.current, data, torch.tensor(5.0), numbers.mask.sum())[0].item() == pytest.approx(-1.0)


def test_skipping_groups_of_equal_rewards_changes_the_mean():
    """Rewards (1, 1), (0, 1), one token a row: skipped, the second group has the whole mean, otherwise half of it."""
    advantages, constant = group_advantages(torch.tensor([1.0, 1, 0, 1]), 2)
    for skipped, count in ((True, 2), (False, 4)):
        logprobs = torch.full((4, 1), -1.0, requires_grad=True)
        data: BatchedDataDict[Any] = BatchedDataDict(
            {
                "advantages": advantages[:, None].expand(-1, 2),
                "token_mask": torch.ones(4, 2),
                "sample_mask": (~(constant & skipped)).float(),
            }
        )
        rows = data["sample_mask"].sum()
        ClippedPGLoss(ClippedPGLossConfig())(logprobs, data, rows, rows)[0].backward()
        assert logprobs.grad is not None
        assert logprobs.grad[3].item() == pytest.approx(-(0.5**0.5) / count, rel=1e-5)


def test_the_corrected_kl_by_hand():
    """One token, on-policy: value k3(d) = e^d - d - 1, gradient k3(d) + 1 - e^d = -d, that of the divergence itself."""
    numbers = Numbers()
    numbers.mask = torch.zeros_like(numbers.mask)
    numbers.mask[3, 0] = 1.0
    numbers.advantages.zero_()
    numbers.reference[3, 0] = numbers.current[3, 0].detach() + 0.5
    for correction, gradient in (("none", 1 - math.exp(0.5)), ("ratio", -0.5), ("score", -0.5)):
        loss = ours(numbers, REFERENCE, kl_coef=0.1, kl_correction=correction)
        assert loss.item() == pytest.approx(0.1 * (math.exp(0.5) - 1.5))
        assert torch.autograd.grad(loss, numbers.current)[0][3, 0].item() == pytest.approx(0.1 * gradient)


def test_the_weight_of_the_kl_off_policy_by_hand():
    """One token with d = 0.5 whose probability has doubled since `old`, and is half the generator's.

    With k = e^d - d - 1 the value is w k and the gradient w (k + 1 - e^d) = -w d, where w is 1, 2 or 1/2. The bound is
    that of w k, beyond which there is no gradient.
    """
    numbers, d = Numbers(), 0.5
    k = math.exp(d) - d - 1
    numbers.mask = torch.zeros_like(numbers.mask)
    numbers.mask[3, 0] = 1.0
    numbers.advantages.zero_()
    token = numbers.current.detach()[3, 0]
    numbers.old[3, 0], numbers.generator[3, 0] = token - math.log(2), token + math.log(2)
    numbers.reference[3, 0] = token + d
    columns = (OLD, REFERENCE, GENERATOR)
    for correction, weight in (("score", 1.0), ("ratio", 2.0), ("generator", 0.5)):
        for bound in (None, 1.5 * k):
            loss = ours(numbers, *columns, kl_coef=0.1, kl_correction=correction, kl_max=bound)
            bounded = bound is not None and weight * k > bound
            assert loss.item() == pytest.approx(0.1 * (1.5 * k if bounded else weight * k))
            gradient = torch.autograd.grad(loss, numbers.current)[0][3, 0].item()
            assert gradient == pytest.approx(0.0 if bounded else 0.1 * -weight * d)


# -- advantages --------------------------------------------------------------------------------------------------------

REWARDS = torch.tensor([1.0, 0, 0, 1, 3, 1.5, 1, 1, 0.25, 0.25, 0.25, 0.25])


def grouped(rewards: Tensor, epsilon: float) -> Tensor:
    groups = rewards.view(-1, 4)
    centered = groups - groups.mean(1, keepdim=True)
    deviation = (centered.square().sum(1, keepdim=True) / 3).sqrt()
    return (centered / (deviation + epsilon)).flatten()


def leave_one_out(rewards: Tensor) -> Tensor:
    return torch.stack(
        [reward - (group.sum() - reward) / 3 for group in rewards.view(-1, 4) for reward in group.unbind()]
    )


ADVANTAGES: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, Any]]] = {
    "advantages-trl": (lambda rewards: grouped(rewards, 1e-4), {"std_epsilon": 1e-4}),
    "advantages-verl": (lambda rewards: grouped(rewards, 1e-6), {}),
    "advantages-nemo_rl": (lambda rewards: grouped(rewards, 1e-6), {}),
    "unscaled-trl": (
        lambda rewards: (rewards.view(-1, 4) - rewards.view(-1, 4).mean(1, keepdim=True)).flatten(),
        {"normalize_std": False},
    ),
    "leave_one_out-verl": (leave_one_out, {"leave_one_out": True, "normalize_std": False}),
    "leave_one_out-nemo_rl": (leave_one_out, {"leave_one_out": True, "normalize_std": False}),
}


def own_advantages(rewards: Tensor, **settings: Any) -> Tensor:
    config = GRPOConfig(samples_per_prompt=4, **settings)
    return group_advantages(
        rewards, 4, leave_one_out=config.leave_one_out, normalize_std=config.normalize_std, eps=config.std_epsilon
    )[0]


@pytest.mark.parametrize("case", ADVANTAGES)
def test_advantages(case):
    theirs, settings = ADVANTAGES[case]
    torch.testing.assert_close(own_advantages(REWARDS, **settings), theirs(REWARDS), rtol=1e-6, atol=1e-6)


def test_leave_one_out_with_the_deviation_of_nemo_rl():
    """NeMo-RL: the deviation of the others, and no division where it is 0. Rewards 1, 0, 0, 0."""
    rewards = torch.tensor([1.0, 0, 0, 0])
    theirs = []
    for i in range(4):
        others = torch.cat((rewards[:i], rewards[i + 1 :]))
        deviation = others.std()
        advantage = rewards[i] - others.mean()
        theirs.append((advantage / (deviation + 1e-6) if deviation > 0 else advantage).item())
    assert theirs == pytest.approx([1.0, *[-1 / 3 / (1 / 3) ** 0.5] * 3], rel=1e-5)
    found = own_advantages(rewards, leave_one_out=True, normalize_std="others")
    assert found.tolist() == pytest.approx(theirs, rel=1e-5)
    of_group = own_advantages(rewards, leave_one_out=True)
    assert of_group.tolist() == pytest.approx([2.0, -2 / 3, -2 / 3, -2 / 3], rel=1e-5)


def test_the_epsilon_of_the_deviation_matters():
    """A deviation of 1e-3: TRL's epsilon takes a tenth off."""
    rewards = torch.tensor([0.0, 0, 0, 0.002])
    small, large = own_advantages(rewards), own_advantages(rewards, std_epsilon=1e-4)
    assert small[3].item() == pytest.approx(1.5 / (1 + 1e-3), rel=1e-5)
    assert large[3].item() == pytest.approx(1.5 / 1.1, rel=1e-5)


# -- learning rates and weight decay -----------------------------------------------------------------------------------


def transformers_rates(name: str, warmup: int, total: int, **keywords: Any) -> list[float]:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_scheduler(name, optimizer, warmup, total, keywords or None)
    rates = []
    for _ in range(total):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


def verl_rates(warmup: int, total: int, minimum: float) -> list[float]:
    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        turn = math.cos(math.pi * (step - warmup) / (total - warmup))
        return turn * (1 - minimum) / 2 + (1 + minimum) / 2

    return [factor(step) for step in range(total)]


SCHEDULES: dict[str, tuple[Callable[[], list[float]], dict[str, Any]]] = {
    "constant-transformers": (lambda: transformers_rates("constant_with_warmup", 4, 9), {"warmup_steps": 4}),
    "linear-transformers": (
        lambda: transformers_rates("linear", 3, 9),
        {"name": "linear", "warmup_steps": 3, "total_steps": 9},
    ),
    "cosine-transformers": (
        lambda: transformers_rates("cosine", 3, 9),
        {"name": "cosine", "warmup_steps": 3, "total_steps": 9},
    ),
    "minimum-transformers": (
        lambda: transformers_rates("cosine_with_min_lr", 3, 9, min_lr_rate=0.1),
        {"name": "cosine", "warmup_steps": 3, "total_steps": 9, "min_ratio": 0.1},
    ),
    "cosine-verl": (
        lambda: verl_rates(3, 9, 0.1),
        {"name": "cosine", "warmup_steps": 3, "total_steps": 9, "min_ratio": 0.1},
    ),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_learning_rates(case):
    theirs, settings = SCHEDULES[case]
    wanted = theirs()
    assert wanted[0] == 0.0
    own = [learning_rate(1.0, SchedulerConfig(**settings), step) for step in range(len(wanted))]
    assert own == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def tiny_model() -> torch.nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(num_attention_heads=2, num_key_value_heads=1, **sizes))


def decayed_by_us(named: list[tuple[str, torch.nn.Parameter]]) -> set[str]:
    groups = parameter_groups(named, OptimizerConfig(weight_decay=0.1))
    places = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    return {name for name, parameter in named if id(parameter) in places}


def test_transformers_decays_the_same_parameters_of_a_usual_model():
    """Qwen2 has biases, norms, matrices and an embedding."""
    from transformers import Trainer

    model = tiny_model()
    theirs = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]  # reads nothing of itself
    assert decayed_by_us(list(model.named_parameters())) == theirs
    assert len(theirs) < len(list(model.parameters()))


def test_transformers_decides_by_name_and_ours_by_dimension():
    """gpt-oss: the sinks are vectors without a telling name, the biases of experts are matrices."""
    from transformers import GptOssConfig, GptOssForCausalLM, Trainer

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    model = GptOssForCausalLM(GptOssConfig(num_attention_heads=2, num_key_value_heads=1, **sizes, **experts))
    theirs = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    own = decayed_by_us(list(model.named_parameters()))
    assert {name.rpartition(".")[2] for name in theirs - own} == {"sinks"}
    assert {name.rpartition(".")[2] for name in own - theirs} == {"gate_up_proj_bias", "down_proj_bias"}


# -- log-probabilities and supervised loss -----------------------------------------------------------------------------


def test_logprobs_and_entropy_are_of_logits_divided_by_the_temperature():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = 0.3 * torch.randn(5, 8, generator=generator), torch.randn(11, 8, generator=generator)
    targets = torch.tensor([0, 3, 10, 7, 7])
    logprobs, entropy = chunked_logprobs(hidden, weight, None, targets, temperature=0.7, wants_entropy=True)
    whole = torch.log_softmax(hidden @ weight.T / 0.7, -1)
    torch.testing.assert_close(logprobs, whole[torch.arange(5), targets], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, -(whole.exp() * whole).sum(1), rtol=1e-6, atol=1e-6)


def test_the_supervised_loss_is_that_of_transformers():
    """Two microbatches of one optimizer step: transformers divides by `num_items_in_batch`, the labels of both."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 11, (4, 6), generator=generator)
    logits = torch.randn(4, 6, 11, generator=generator, requires_grad=True)
    trained = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1]])
    labels = torch.where(trained > 0, ids, -100)
    count = (labels[:, 1:] != -100).sum()
    theirs = sum(
        ForCausalLMLoss(logits[part], labels[part], vocab_size=11, num_items_in_batch=count)
        for part in (slice(0, 1), slice(1, 4))
    )
    logprobs = torch.log_softmax(logits, -1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    data: BatchedDataDict[Any] = BatchedDataDict({"token_mask": trained.float(), "sample_mask": torch.ones(4)})
    loss, _ = NLLLoss()(logprobs, data, torch.tensor(4.0), trained[:, 1:].sum().float())
    torch.testing.assert_close(loss, theirs, rtol=1e-6, atol=1e-6)


# -- the pages ---------------------------------------------------------------------------------------------------------


PAGES: dict[str, tuple[Callable[[Numbers], Tensor], float]] = {
    "trl": (lambda n: trl(n, beta=WEIGHT, high=0.2), 1e-4),
    "verl": (lambda n: verl(n, high=0.2) + WEIGHT * verl_low_var_kl(n), 1e-6),
    "nemo_rl": (lambda n: nemo_rl(n, kl=WEIGHT, high=0.2, ratio_clip_c=None), 1e-6),
}


@pytest.mark.parametrize("page", PAGES)
def test_the_settings_on_the_page_of_each_system(page):
    """The configuration below "The same numbers as", with a weight of the KL term that shows."""
    text = (ROOT / "docs" / "moving" / f"{page}.md").read_text(encoding="utf-8")
    block = text.partition("\n## The same numbers as")[2].partition("```yaml\n")[2].partition("```")[0]
    settings = yaml.safe_load(block)["algorithm"]
    assert settings["skip_zero_variance"] is False
    theirs, epsilon = PAGES[page]
    numbers = small_kl(Numbers())
    if page == "nemo_rl":  # without a dual clip the ratio of exp(25) would be all there is
        numbers.old[0, 0] += 25.0
    wanted = numbers.token_mean(theirs(numbers))
    found = ours(numbers, OLD, REFERENCE, **settings.pop("loss") | {"kl_coef": WEIGHT})
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(loss, numbers.current)[0] for loss in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own_advantages(REWARDS, **settings), grouped(REWARDS, epsilon), rtol=1e-6, atol=1e-6)


def named_on_the_page() -> set[str]:
    """The cases and tests in the last column of the page's tables."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    last = [line.strip().strip("|").split(" | ")[-1] for line in lines if line.startswith("| ")]
    return {name for cell in last for name in re.findall(r"`([^`]+)`", cell)}


def test_each_row_of_the_page_has_a_test_and_each_case_a_row():
    named, cases = named_on_the_page(), {*LOSSES, *ADVANTAGES, *SCHEDULES}
    here = {name for name in globals() if name.startswith("test_")}
    assert cases <= named
    for name in named - cases - here:
        path, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), name


def test_the_versions_of_all_presets_are_on_the_page():
    text = PAGE.read_text(encoding="utf-8").partition("\n## Versions\n")[2]
    named = {name for line in text.splitlines() for name in re.findall(r"^- `(\w+)`:", line)}
    assert named == {preset for presets in PRESETS.values() for preset in presets} - {"paper"}
