"""The arithmetic of LoRA, computed by hand."""

from __future__ import annotations

import torch

from rlframework.policy.lora_math import initial_a, merge


def test_a_merged_weight_is_the_base_and_the_scaled_product():
    base = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    lora_a, lora_b = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[2.0], [10.0]])
    merged = merge(base, lora_a, lora_b, 0.5)
    assert torch.equal(merged, torch.tensor([[2.0, 2.0, 2.0], [9.0, 5.0, 1.0]]))
    assert torch.equal(base, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])), "merge must not work in place"
    half, tiny = torch.ones(1, 1, dtype=torch.bfloat16), torch.full((1, 1), 0.01, dtype=torch.bfloat16)
    merged = merge(half, tiny, torch.full((1, 1), 100.0), 1.0)  # in fp32, returned in the dtype of the base
    assert torch.equal(merged, (1.0 + tiny.float() * 100.0).to(torch.bfloat16))


def test_initial_a_depends_on_name_and_seed_only_and_is_bounded():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = initial_a("layers.0.q_proj.lora_A.weight", (8, 64), 0)
    assert torch.equal(torch.get_rng_state(), state), "the process's random state must not change"
    torch.manual_seed(2)
    assert torch.equal(first, initial_a("layers.0.q_proj.lora_A.weight", (8, 64), 0))
    assert not torch.equal(first, initial_a("layers.1.q_proj.lora_A.weight", (8, 64), 0))
    assert not torch.equal(first, initial_a("layers.0.q_proj.lora_A.weight", (8, 64), 1))
    assert first.abs().max() <= 0.125  # 1 / sqrt(64)
    assert 0.05 < first.std() < 0.1  # of a uniform distribution: 0.125 / sqrt(3) = 0.072
