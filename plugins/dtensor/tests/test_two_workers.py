"""Two Ray workers that share the rows, against the oracle in one process: contracts 2 and 4 for data=2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlframework import create_manager, load_config
from rlframework.algorithms.losses import NLLLoss
from rlframework.policy.policy import Policy

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
]


@pytest.fixture
def policy(model_path, tokenizer, tmp_path):
    """`policy(**policy_keys)`: on two workers."""
    made: list[Policy] = []

    def make(**keys: Any) -> Policy:
        config = load_config(
            {
                "output_dir": str(tmp_path / "unused"),
                "device": "cpu",
                "algorithm": {"name": "sft"},
                "environment": {"name": "addition"},
                "policy": {
                    "model_name": str(model_path),
                    "train_global_batch_size": 8,
                    "optimizer": {"lr": 1e-4},
                    "batching": {"mode": "packed", "tokens": 20},
                    **keys,
                },
                "worker_group": {"name": "ray", "num_workers": 2},
            }
        )
        made.append(Policy(config, tokenizer, create_manager(), device="cpu", init_reference_model=True))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def saved_weights(policy: Policy, path: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    policy.save_pretrained(str(path))
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in loaded.named_parameters()}


def test_two_workers_do_what_the_oracle_does(policy, oracle, batches, weights_close, tmp_path):
    shared, plain = policy(), oracle()
    first, second, *others = batches(20)
    original = plain.logprobs(first).detach()

    seven = first.slice(0, 7)  # does not divide: a row is repeated, and dropped again
    got = shared.get_logprobs(seven)["logprobs"]
    torch.testing.assert_close(got, original[:7], rtol=1e-5, atol=1e-5)

    two = first.slice(0, 2).select_indices([0, 1])
    two["input_lengths"][1] = 0  # one of the workers has no token
    two["token_mask"][1] = 0
    got = shared.get_logprobs(two)["logprobs"]
    torch.testing.assert_close(got[0], original[0], rtol=1e-5, atol=1e-5)
    assert not got[1].any()

    first["sample_mask"][1:] = 0.0  # one row is work: the other worker has nothing but a dummy
    second["sample_mask"][:7] = 0.0
    for batch in (first, second, *others):
        result = shared.train(batch, NLLLoss())
        loss, norm = plain.step(batch, "nll")
        assert result["loss"] == pytest.approx(loss, rel=1e-4)
        assert float(result["grad_norm"][0]) == pytest.approx(norm, rel=1e-4)
        assert result["global_valid_seqs"] == batch["sample_mask"].sum()
    weights_close(saved_weights(shared, tmp_path / "twenty"), plain.weights())

    moved = shared.get_logprobs(first)["logprobs"]
    reference = shared.get_reference_policy_logprobs(first)["reference_logprobs"]
    torch.testing.assert_close(reference, original, rtol=1e-5, atol=1e-5)
    assert torch.equal(shared.get_logprobs(first)["logprobs"], moved)
    torch.testing.assert_close(moved, plain.logprobs(first).detach(), rtol=1e-4, atol=1e-4)
