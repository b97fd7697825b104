"""Muon: its update against a float64 reference, and which parameters it takes."""

from __future__ import annotations

import math

import pytest
import torch

from rlframework.config.policy import OptimizerConfig
from rlframework.policy.optimization import layer_matrices
from rlframework_conformance import cases
from rlframework_dtensor.optimizer import MuonWithAdamW, muon_update


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)], ids=str)
def test_an_update_is_the_orthogonalized_average(shape):
    """Five steps of the quintic iteration act on the singular values alone, which float64 computes exactly."""
    average = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(average.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = -0.2 * 0.01 * math.sqrt(max(shape)) * (left * values) @ right
    got = muon_update(average, 0.01).double()
    assert (got - expected).norm() < 0.02 * expected.norm()  # torch iterates in bfloat16
    rows = shape[0] // 2
    halves = torch.cat([muon_update(average[:rows], 0.01), muon_update(average[rows:], 0.01)]).double()
    assert (halves - expected).norm() > 0.2 * expected.norm()  # what sharded matrices would give


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_muon_takes_the_matrices_of_the_layers(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(cases.model(kind, tmp_path))
    taken = set(map(id, layer_matrices(model)))
    found = {name for name, parameter in model.named_parameters() if id(parameter) in taken}
    assert found == {name for name, _ in model.named_parameters() if "_proj" in name}
    optimizer = MuonWithAdamW(model, OptimizerConfig(name="muon", weight_decay=0.3))
    decays = {id(one): group["weight_decay"] for group in optimizer.param_groups for one in group["params"]}
    assert decays == {id(one): 0.3 if one.ndim > 1 else 0.0 for one in model.parameters()}


@pytest.mark.slow
def test_both_take_the_learning_rate_of_the_step(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(cases.model("untied", tmp_path))
    optimizer = MuonWithAdamW(model, OptimizerConfig(name="muon", lr=1.0))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for lr, moves in ((0.0, False), (0.1, True)):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert all(torch.equal(one, before[name]) != moves for name, one in model.named_parameters())
