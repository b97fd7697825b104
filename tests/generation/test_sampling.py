"""The sampling rule: allowed sets, exact inversions, and random numbers by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlframework.generation import sampling
from rlframework.generation.sampling import choose, draw, folded_seed, row_uniforms
from rlframework.interfaces.generation import SamplingParams

finite_logits = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=20)
uniform = st.floats(0, 1, exclude_max=True)


def allowed_set(probabilities: list[float], top_k: int | None, top_p: float) -> set[int]:
    """Tokens that may come, by the definition, with tolerance: every token as likely as the last one is in."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    order = order[: top_k or len(order)]
    whole = sum(probabilities[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if kept and mass >= top_p + 1e-6:
            break
        kept.append(token)
        mass += probabilities[token] / whole
    least = min(probabilities[token] for token in kept)
    return {token for token, p in enumerate(probabilities) if p >= least * (1 - 1e-6)}


@pytest.mark.slow
@given(finite_logits, uniform, st.none() | st.integers(1, 25), st.floats(0.01, 1.0))
def test_never_outside_the_allowed_set(logits: list[float], u: float, top_k: int | None, top_p: float) -> None:
    logprobs = torch.log_softmax(torch.tensor([logits], dtype=torch.float32), -1)
    token = int(draw(logprobs, torch.tensor([u], dtype=torch.float64), top_k, top_p))
    assert token in allowed_set(logprobs[0].double().exp().tolist(), top_k, top_p)


def test_inversion_by_hand() -> None:
    """Probabilities 0.2, 0.5, 0, 0.3: the sums are 0.2, 0.7, 0.7, 1."""
    logprobs = torch.tensor([[0.2, 0.5, 0.0, 0.3]], dtype=torch.float64).log().repeat(6, 1)
    uniforms = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 1 - 2**-53], dtype=torch.float64)
    assert draw(logprobs, uniforms).tolist() == [0, 0, 1, 1, 3, 3]


def test_truncated_inversion_by_hand() -> None:
    """Sorted 0.5 (token 1), 0.3 (3), 0.2 (0). Top-2 leaves 5:3; top-p 0.75 the same two; top-p 0.5 the first alone."""
    logprobs = torch.tensor([[0.2, 0.5, 0.0, 0.3]], dtype=torch.float64).log().repeat(4, 1)
    uniforms = torch.tensor([0.0, 0.62, 0.63, 0.99], dtype=torch.float64)
    assert draw(logprobs, uniforms, top_k=2).tolist() == [1, 1, 3, 3]
    assert draw(logprobs, uniforms, top_p=0.75).tolist() == [1, 1, 3, 3]
    assert draw(logprobs, uniforms, top_p=0.5).tolist() == [1, 1, 1, 1]
    assert draw(logprobs, uniforms, top_k=1).tolist() == [1, 1, 1, 1]
    # top-k first: 0.5 and 0.3 become 0.625 and 0.375, so that 0.6 is reached by the first alone
    assert draw(logprobs, uniforms, top_k=2, top_p=0.6).tolist() == [1, 1, 1, 1]


def test_logprobs_at_the_temperature() -> None:
    """Logits log 1, log 2, log 4: at temperature 2 weights 1, sqrt 2, 2; greedy reports temperature 1: 4/7."""
    logits = torch.tensor([[1.0, 2.0, 4.0]]).log()
    token, logprob = choose(logits, torch.tensor([0.999], dtype=torch.float64), SamplingParams(2.0, top_k=1))
    assert token.tolist() == [2]
    assert math.isclose(float(logprob), math.log(2 / (3 + math.sqrt(2))), rel_tol=1e-6)
    token, logprob = choose(logits, None, SamplingParams(0.0))
    assert token.tolist() == [2]
    assert math.isclose(float(logprob), math.log(4 / 7), rel_tol=1e-6)


def test_uniforms_are_numpys_philox_and_belong_to_seed_and_position() -> None:
    expected = np.random.Generator(np.random.Philox(key=123)).random(8)
    assert np.array_equal(row_uniforms(torch.tensor([123]), 8)[0].numpy(), expected)
    seeds = torch.tensor([7, -1, 2**63 - 1, 7])
    long, short = row_uniforms(seeds, 40), row_uniforms(seeds.flip(0), 13)
    assert torch.equal(long.flip(0)[:, :13], short)
    assert torch.equal(long[0], long[3])
    assert len({tuple(row.tolist()) for row in long}) == 3
    assert bool(((long >= 0) & (long < 1)).all())


def test_a_folded_seed_depends_on_all_bits() -> None:
    folded = [folded_seed(seed) for seed in (0, -1, *(1 << bit for bit in range(63)), -(1 << 63))]
    assert len(set(folded)) == len(folded)
    assert all(0 <= seed < 2**32 for seed in folded)


@pytest.mark.parametrize("rule", [SamplingParams(), SamplingParams(0.0), SamplingParams(0.7, 5, 0.9)])
def test_rows_sampled_in_parts_are_those_sampled_together(
    rule: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = 3 * torch.randn(7, 20, generator=torch.Generator().manual_seed(0))
    uniforms = None if rule.greedy else row_uniforms(torch.arange(7), 1)[:, 0]
    together = choose(logits, uniforms, rule)
    monkeypatch.setattr(sampling, "SAMPLED_ELEMENTS", 60)
    assert all(map(torch.equal, choose(logits, uniforms, rule), together))
