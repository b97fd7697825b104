"""Each algorithm and preset against `policy_gradient_formulas`, from rewards to the loss and its gradient."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from policy_gradient_formulas import (
    GROUP,
    LENGTHS,
    LIMIT,
    REWARDS,
    ROWS,
    WIDTH,
    Numbers,
    Result,
    centered,
    cispo,
    each,
    gspo,
    leave_one_out,
    leave_one_out_by_others,
    minus_kl,
    minus_kl_of_token,
    minus_kl_to_go,
    of_completion,
    of_constant,
    of_sequences,
    of_tokens,
    ppo,
    reinforce,
    scaled,
    total,
    whitened,
    with_kl,
)
from torch import Tensor

from rlframework.algorithms.advantages import add_advantages
from rlframework.algorithms.grpo import policy_loss
from rlframework.config.algorithm_presets import PRESETS
from rlframework.config.algorithms import GRPOConfig

OF_GRPO = [name for name in PRESETS if name != "ppo"]  # test_ppo.py


def configured(**keys: Any) -> Any:
    """The section with `keys`, as from a file."""
    return GRPOConfig(**keys)


def ours(numbers: Numbers, config: GRPOConfig) -> tuple[float, Tensor]:
    """The loss of `config` and its gradient, from the rewards on."""
    result = numbers.rollout()
    add_advantages(result, config, LIMIT)
    logprobs = torch.tensor(numbers.p, dtype=torch.float64, requires_grad=True)
    toks = (result.data["token_mask"][:, 1:] * result.data["sample_mask"][:, None]).sum()
    loss, _ = policy_loss(config, LIMIT)(logprobs, result.data, result.data["sample_mask"].sum(), toks)
    return loss.item(), torch.autograd.grad(loss, logprobs)[0]


def compare(found: tuple[float, Tensor], wanted: Result) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-9, abs=1e-9)
    torch.testing.assert_close(found[1], torch.tensor(wanted[1], dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert found[1].abs().max() > 1e-3


CASES: dict[tuple[str, str], Callable[[Numbers], Result]] = {
    ("grpo", "paper"): lambda n: total(scaled(), with_kl(n, ppo(n), 0.04), of_sequences),
    ("grpo", "trl"): lambda n: total(scaled(1e-4), ppo(n), of_tokens),
    ("grpo", "verl"): lambda n: total(scaled(), ppo(n, c=3.0), of_tokens),
    ("grpo", "nemo_rl"): lambda n: total(leave_one_out_by_others(), with_kl(n, ppo(n), 0.01, "scored"), of_tokens),
    ("dr_grpo", "paper"): lambda n: total(centered(), ppo(n), of_constant),
    ("dr_grpo", "trl"): lambda n: total(centered(), ppo(n), of_constant),
    ("dr_grpo", "verl"): lambda n: total(centered(), ppo(n, c=3.0), of_constant),
    ("dapo", "paper"): lambda n: total(scaled(), ppo(n, 0.2, 0.28), of_tokens),
    ("dapo", "trl"): lambda n: total(scaled(1e-4), ppo(n, 0.2, 0.28), of_tokens),
    ("dapo", "verl"): lambda n: total(scaled(), ppo(n, 0.2, 0.28, 10.0), of_tokens),
    ("dapo", "nemo_rl"): lambda n: total(scaled(), ppo(n, 0.2, 0.28, 10.0), of_tokens),
    ("gspo", "paper"): lambda n: total(scaled(), gspo(n), of_sequences),
    ("gspo", "trl"): lambda n: total(scaled(1e-4), gspo(n), of_sequences),
    ("gspo", "verl"): lambda n: total(scaled(), gspo(n), of_sequences),
    ("gspo", "nemo_rl"): lambda n: total(leave_one_out_by_others(), with_kl(n, gspo(n), 0.01, "scored"), of_sequences),
    ("cispo", "paper"): lambda n: total(scaled(), cispo(n, 0.0, 5.0), of_tokens),
    ("cispo", "trl"): lambda n: total(scaled(1e-4), cispo(n, 0.0, 5.0), of_tokens),
    ("cispo", "verl"): lambda n: total(scaled(), cispo(n, 0.8, 1.2), of_tokens),
    ("cispo", "nemo_rl"): lambda n: total(leave_one_out_by_others(), cispo(n, 0.0, 1.8), of_tokens),
    ("rloo", "paper"): lambda n: total(leave_one_out(minus_kl(n, 0.05)), reinforce(n), lambda i: 1 / ROWS),
    ("rloo", "trl"): lambda n: total(leave_one_out(minus_kl(n, 0.05)), of_completion(n), of_sequences),
    ("rloo", "verl"): lambda n: total(leave_one_out(REWARDS), ppo(n, c=3.0), of_tokens),
    ("rloo", "nemo_rl"): lambda n: total(leave_one_out(REWARDS), with_kl(n, reinforce(n), 0.01, "scored"), of_tokens),
    ("reinforce_plus_plus", "paper"): lambda n: total(whitened(minus_kl_to_go(n, 0.01)), ppo(n), of_tokens),
    ("reinforce_plus_plus", "verl"): lambda n: total(whitened(each(REWARDS), sample=True), ppo(n, c=3.0), of_tokens),
    ("reinforce_plus_plus", "nemo_rl"): lambda n: total(whitened(minus_kl_of_token(n, 0.01)), ppo(n), of_tokens),
    ("reinforce_plus_plus_baseline", "paper"): lambda n: total(
        whitened(centered()), with_kl(n, ppo(n), 0.01, "k2"), of_tokens
    ),
    ("reinforce_plus_plus_baseline", "verl"): lambda n: total(
        whitened(centered(), sample=True), ppo(n, c=3.0), of_tokens
    ),
    ("reinforce_plus_plus_baseline", "nemo_rl"): lambda n: total(
        whitened(centered()), with_kl(n, ppo(n), 0.01, "scored"), of_tokens
    ),
}


def test_every_preset_has_a_case() -> None:
    assert set(CASES) == {(name, preset) for name in OF_GRPO for preset in PRESETS[name]}


@pytest.mark.parametrize(("name", "preset"), CASES)
def test_loss_and_gradient(name: Any, preset: Any) -> None:
    numbers = Numbers()
    compare(ours(numbers, configured(name=name, preset=preset, samples_per_prompt=GROUP)), CASES[name, preset](numbers))


@pytest.mark.parametrize("name", OF_GRPO)
def test_an_algorithm_without_a_preset_is_that_of_its_paper(name: Any) -> None:
    config = configured(name=name)
    if name == "grpo":
        assert config == configured()
        assert not config.loss.kl_coef
    else:
        assert config.model_copy(update={"preset": "paper"}) == configured(name=name, preset="paper")


def test_keys_that_are_set_take_precedence() -> None:
    config = configured(name="dapo", dynamic_sampling=0, loss={"ratio_clip_max": 0.3, "kl_coef": 0.1})
    assert (config.dynamic_sampling, config.loss.ratio_clip_max, config.loss.kl_coef) == (0, 0.3, 0.1)
    config = configured(name="gspo", loss={"kl_coef": 0.1})
    assert (config.loss.ratio, config.loss.level, config.loss.ratio_clip_max) == ("sequence", "sequence", 4e-4)
    config = configured(name="rloo", reward_kl=None, loss={"level": "token"})
    assert (config.reward_kl, config.loss.level, config.loss.constant_length) == (None, "token", None)
    assert configured(name="dapo", loss="my_losses:MyLoss").loss.name == "my_losses:MyLoss"
    assert configured(**config.model_dump()) == config


def test_a_system_without_the_algorithm_has_no_preset_of_it() -> None:
    with pytest.raises(ValueError, match="there is no preset 'trl' of reinforce_plus_plus; it has paper, verl, nemo_"):
        configured(name="reinforce_plus_plus", preset="trl")


# -- terms that no preset has ------------------------------------------------------------------------------------------


def test_a_ratio_with_the_value_of_the_sequence_and_the_gradient_of_the_token() -> None:
    """GSPO-token (arXiv:2507.18071, eq. 14) with an advantage for each token: of one row, s is 2, without clips."""
    numbers = Numbers()
    result = numbers.rollout()
    config = configured(name="gspo", loss={"ratio": "sequence_token", "ratio_clip_min": 0.9, "ratio_clip_max": 9.0})
    logprobs = torch.tensor(numbers.p, dtype=torch.float64, requires_grad=True)
    result.data["prev_logprobs"][:, 1:] = logprobs.detach()
    result.data["prev_logprobs"][2, 1:3] -= 2 * math.log(2)  # two of four tokens, so the mean is log 2
    result.data["advantages"] = torch.zeros(ROWS, WIDTH + 1, dtype=torch.float64)
    result.data["advantages"][2, 1:5] = torch.tensor([1.0, -2.0, 3.0, 0.0])
    loss, _ = policy_loss(config, LIMIT)(logprobs, result.data, torch.tensor(1.0), torch.tensor(4.0))
    assert loss.item() == pytest.approx(-2.0 * (1 - 2 + 3) / 4)
    gradient = torch.autograd.grad(loss, logprobs)[0]
    assert gradient[2, :4].tolist() == pytest.approx([-0.5, 1.0, -1.5, 0.0])
    assert gradient.abs().sum().item() == pytest.approx(3.0)


@pytest.mark.parametrize(("ratio", "slope"), [("sequence", 1 / 4), ("sequence_token", 1 / 4), ("product", 1.0)])
def test_the_ratio_of_an_on_policy_row_is_one(ratio: str, slope: float) -> None:
    """Without `prev_logprobs`; a mean over its four tokens, and the gradient of the row's mean or sum."""
    result = Numbers().rollout()
    del result.data["prev_logprobs"]
    result.data["advantages"] = torch.full((ROWS, WIDTH + 1), 3.0, dtype=torch.float64)
    result.data["sample_mask"] = torch.tensor([0.0, 0, 1, 0, 0, 0], dtype=torch.float64)
    logprobs = torch.tensor(Numbers().p, dtype=torch.float64, requires_grad=True)
    loss_fn = policy_loss(configured(name="gspo", loss={"ratio": ratio}), LIMIT)
    loss, metrics = loss_fn(logprobs, result.data, torch.tensor(1.0), torch.tensor(4.0))
    assert loss.item() == pytest.approx(-3.0)
    assert metrics["ratio"].item() == pytest.approx(1.0)
    gradient = torch.autograd.grad(loss, logprobs)[0]
    assert gradient[2].tolist() == pytest.approx([-3.0 * slope] * 4 + [0.0] * 3)


def of_level(n: Numbers, level: str, i: int, t: int) -> float:
    differences = n.of_row(i, lambda i, t: n.old[i][t] - n.gen[i][t])
    if level == "token":
        return math.exp(differences[t])
    return math.exp(sum(differences) / (LENGTHS[i] if level == "geometric" else 1))


def corrected(n: Numbers, weight: Callable[[int, int], float]) -> Result:
    def term(i: int, t: int, advantage: float) -> tuple[float, float]:
        value, slope = ppo(n)(i, t, advantage)
        return weight(i, t) * value, weight(i, t) * slope

    return total(scaled(), term, of_tokens)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_weights_are_truncated_at_each_level(level: str) -> None:
    n = Numbers()
    keys = {"importance_correction": "truncated", "importance_level": level}
    config = configured(samples_per_prompt=GROUP, loss=keys | {"importance_cap": 1.2, "importance_floor": 0.9})
    ratios = {of_level(n, level, i, t) for i in range(ROWS) for t in range(LENGTHS[i])}
    assert min(ratios) < 0.9
    assert max(ratios) > 1.2
    compare(ours(n, config), corrected(n, lambda i, t: min(max(of_level(n, level, i, t), 0.9), 1.2)))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_tokens_beyond_the_mask_have_no_loss(level: str) -> None:
    """As IcePop (token) and NeMo-RL's seq-mask-tis (geometric) with the weights of tokens, which have no cap here."""
    n = Numbers()
    low, high = (0.5, 4.0) if level == "sequence" else (0.8, 1.25)
    mask = {"importance_mask": level, "importance_mask_min": low, "importance_mask_max": high}
    weights = {"importance_correction": "truncated", "importance_cap": 1e9}

    def keep(i: int, t: int) -> float:
        return float(low <= of_level(n, level, i, t) <= high)

    assert {keep(i, t) for i in range(ROWS) for t in range(LENGTHS[i])} == {0.0, 1.0}
    compare(ours(n, configured(samples_per_prompt=GROUP, loss=mask)), corrected(n, keep))
    both = configured(samples_per_prompt=GROUP, loss=mask | weights)
    compare(ours(n, both), corrected(n, lambda i, t: keep(i, t) * of_level(n, "token", i, t)))


def test_the_sequence_mask_of_trl() -> None:
    """Its default with vLLM: the weight of the whole completion, 0 beyond 3."""
    n = Numbers()
    keys = {"importance_correction": "truncated", "importance_level": "sequence", "importance_cap": 3.0}
    keys |= {"importance_mask": "sequence", "importance_mask_min": 0.0, "importance_mask_max": 3.0}

    def weight(i: int, t: int) -> float:
        found = of_level(n, "sequence", i, t)
        return found if found <= 3.0 else 0.0

    assert {weight(i, 0) > 0 for i in range(ROWS)} == {True, False}
    compare(ours(n, configured(samples_per_prompt=GROUP, loss=keys)), corrected(n, weight))


def test_the_constant_of_a_mean_over_sequences() -> None:
    """The limit of new tokens unless it is set; a loss of its own has no other to take."""
    from rlframework.algorithms.losses import ClippedPGLoss
    from rlframework.config.algorithms import ClippedPGLossConfig

    for keys, length in (({}, LIMIT), ({"constant_length": 5}, 5)):
        loss_fn = policy_loss(configured(name="dr_grpo", loss=keys), LIMIT)
        assert isinstance(loss_fn, ClippedPGLoss)
        assert loss_fn.config.constant_length == length
    with pytest.raises(ValueError, match="level=constant divides by constant_length; set it"):
        ClippedPGLoss(ClippedPGLossConfig(level="constant"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss": {"constant_length": 3}}, "constant_length is for level=constant, but level is token"),
        ({"loss": {"surrogate": "cispo", "ratio_clip_c": 3.0}}, "ratio_clip_c is for surrogate=clipped"),
        ({"loss": {"importance_floor": 3.0}}, r"importance_floor is 3\.0, but must be at most importance_cap = 2\.0"),
        ({"loss": {"importance_mask_min": 3.0}}, "must be at most importance_mask_max"),
        ({"samples_per_prompt": 1}, "samples_per_prompt must be at least 2"),
        ({"leave_one_out": True, "group_baseline": False}, "leave_one_out is a baseline"),
        ({"normalize_std": "others"}, "normalize_std=others is the deviation of the rewards of leave_one_out"),
        ({"dynamic_sampling": 2, "group_baseline": False}, "dynamic_sampling drops groups of equal rewards"),
    ],
)
def test_settings_that_exclude_each_other(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configured(**keys)


# -- the pages ---------------------------------------------------------------------------------------------------------

PAGES = Path(__file__).parents[2] / "docs" / "algorithms"
BLOCK = re.compile(r"```yaml\n# preset: ([\w, ]+)\n(.*?)```", re.DOTALL)


def test_the_settings_on_the_pages_are_those_of_the_presets() -> None:
    """Each block, on top of `grpo`'s own defaults."""
    found = set()
    for page in PAGES.glob("*.md"):
        name: Any = page.stem
        if name == "ppo":  # test_ppo.py
            continue
        for part in page.read_text(encoding="utf-8").split("\n## "):
            heading = re.match(r"Presets of `(\w+)`", part)
            name = heading[1] if heading else name
            for presets, text in BLOCK.findall(part):
                for preset in presets.split(", "):
                    shown = configured(**yaml.safe_load(text)["algorithm"])
                    renamed = shown.model_copy(update={"name": name, "preset": preset})
                    assert renamed == configured(name=name, preset=preset), (page.name, preset)
                    found.add((name, preset))
    assert found == set(CASES)
