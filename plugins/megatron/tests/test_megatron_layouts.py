"""Layouts beyond the suite's: interleaved pipelines, several axes together, keys of `policy.megatron`.

Each is three steps of a tied model of four layers against the oracle, in rows of different lengths.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.plugins.manager import create_manager
from rlframework.policy.client import Policy
from rlframework_conformance import cases
from rlframework_conformance.layouts import Layout
from rlframework_conformance.oracle import Oracle
from rlframework_conformance.policies import run_config, weights_of

pytestmark = pytest.mark.slow

INTERLEAVED = {"virtual_pipeline": 2}
DISTRIBUTED = {"distributed_optimizer": True}
OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
PACKED: dict[str, Any] = {"batching": {"mode": "packed", "tokens": 40}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def compare(folder, tmp_path):
    """`compare(layout, section, model, **keys)`: three steps on both, and all that comes of them."""
    manager = create_manager()

    def run(layout: str, section: dict[str, Any], model: str = "tied", **keys: Any) -> None:
        four_layers = cases.model(model, folder, layers=4)
        oracle = Oracle(four_layers, lr=1e-3)
        config = run_config(
            "megatron",
            four_layers,
            Layout.parse(layout),
            manager=manager,
            megatron=section,
            optimizer={"lr": 1e-3},
            **keys,
        )
        with Policy(config, load_tokenizer(str(four_layers)), manager) as policy:
            for seed in range(3):
                batch = cases.batch(seed=seed)
                found = policy.get_logprobs(batch)["logprobs"]
                torch.testing.assert_close(found, oracle.logprobs(batch), rtol=1e-4, atol=1e-4)
                result, right = policy.train(batch, NLLLoss()), oracle.step(batch, "nll")
                assert result["loss"] == pytest.approx(right.loss, rel=1e-5)
                assert float(result["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=2e-5)
            weights = weights_of(policy, tmp_path / "weights")
        right_weights = oracle.weights()
        assert sorted(weights) == sorted(right_weights)
        for name, weight in right_weights.items():
            difference = (weights[name] - weight).norm() / weight.norm()
            assert difference < 2e-5, name

    return run


@pytest.mark.thorough
@pytest.mark.parametrize("keys", [{}, PACKED], ids=["padded", "packed"])
def test_an_interleaved_pipeline_computes_the_same(compare, keys):
    compare("pipeline=2", INTERLEAVED, **keys)


@pytest.mark.parametrize("section", [DISTRIBUTED, OVERLAPPED], ids=["distributed", "overlapped"])
def test_the_distributed_optimizer_computes_the_same(compare, section):
    compare("data=2", section)


@pytest.mark.parametrize(
    ("layout", "section", "keys"),
    [
        ("tensor=2,pipeline=2,sequence", INTERLEAVED, {}),
        ("context=2,pipeline=2", {}, PACKED),
        ("context=2,tensor=2,sequence", {}, {}),
        ("data=2,pipeline=2", DISTRIBUTED | INTERLEAVED, {}),
        ("data=2,pipeline=2", OVERLAPPED | INTERLEAVED, {}),
        ("data=2,tensor=2", OVERLAPPED, {"activation_checkpointing": True}),
        ("tensor=2,sequence", {}, PACKED | {"activation_checkpointing": "selective"}),
    ],
    ids=str,
)
def test_several_axes_at_once_compute_the_same(compare, layout, section, keys):
    compare(layout, section, **keys)


@pytest.mark.parametrize(
    ("layout", "section", "keys"),
    [
        ("pipeline=2", INTERLEAVED, {}),
        ("context=2", {}, PACKED),
        ("tensor=2,sequence", {}, {}),
        ("data=2,expert=2,pipeline=2", OVERLAPPED, {}),
        ("data=2,expert=2", OVERLAPPED, {"activation_checkpointing": "selective"}),
        ("data=2,expert=2,tensor=2,sequence", OVERLAPPED, PACKED),
    ],
    ids=str,
)
def test_a_mixture_of_experts_computes_the_same_beside_other_axes(compare, layout, section, keys):
    compare(layout, section, "experts", **keys)


def test_a_reference_that_moved_resumes_to_the_bit_with_sharded_fp32_copies(folder, tmp_path):
    """Under bfloat16 a rank has an fp32 copy of a part of a parameter only: the rest is rounded from other ranks'."""
    manager, model, data = create_manager(), cases.model("untied", folder), cases.batch()
    layout, keys = Layout.parse("data=2"), {"megatron": DISTRIBUTED, "precision": "bfloat16"}
    config = run_config("megatron", model, layout, manager=manager, optimizer={"lr": 1e-2}, **keys)
    paths = [str(tmp_path / name) for name in ("model", "optimizer", "reference")]
    scored = []
    for resumed in (False, True):
        with Policy(config, load_tokenizer(str(model)), manager, init_reference_model=True) as policy:
            if resumed:
                policy.load_checkpoint(*paths)
            else:
                for seed in range(3):
                    policy.train(cases.batch(seed=seed), NLLLoss())
                    policy.sync_reference(0.1)
                policy.save_checkpoint(*paths[:2], reference_path=paths[2])
            scored.append(policy.get_reference_policy_logprobs(data)["reference_logprobs"])
    assert torch.equal(*scored)
