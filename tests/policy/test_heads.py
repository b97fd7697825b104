"""Heads and what reads them: a mismatch is an error of the driver, and a new head begins at zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rlframework import create_manager, load_config
from rlframework.algorithms.losses import NLLLoss
from rlframework.base.errors import BatchError, NotSupported
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.policy import PolicyConfig
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.policy.client import Policy
from rlframework_conformance import cases
from rlframework_conformance.suites.policy_worker.losses import ScorePairsLoss, ScoresLoss, ValuesLoss


@pytest.fixture
def make_policy(tiny_llama: Any, tmp_path: Any) -> Any:
    def make(head: str) -> Policy:
        new = {} if head == "language" else {"head_init": "zeros"}
        config = load_config(
            {
                "policy": {"model_name": str(tiny_llama), "train_global_batch_size": 8, "head": head, **new},
                "algorithm": {"name": "sft"},
                "environment": {"name": "addition"},
                "output_dir": str(tmp_path / "run"),
                "device": "cpu",
            }
        )
        return Policy(config, load_tokenizer(str(tiny_llama)), create_manager())

    return make


class EntropyOfScores(ScoresLoss):
    wants_entropy = True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "wrong"),
    [
        ("language", (ScoresLoss(), ValuesLoss(), ScorePairsLoss())),
        ("score", (NLLLoss(), ValuesLoss(), EntropyOfScores())),
        ("value", (NLLLoss(), ScoresLoss())),
    ],
)
def test_a_loss_that_reads_another_head_is_rejected_by_the_driver(make_policy, head, wrong):
    with make_policy(head) as policy:
        calls, policy._calls = policy._calls, None  # nothing reaches a worker
        for loss in wrong:
            with pytest.raises(NotSupported, match=f"{type(loss).__name__}.*{head}"):
                policy.train(cases.batch(), loss)
        scoring = {"language": policy.get_logprobs, "score": policy.score, "value": policy.get_values}
        for reads, call in scoring.items():
            if reads != head:
                with pytest.raises(NotSupported, match=f"policy.head={reads}"):
                    call(cases.batch())
        policy._calls = calls


@pytest.mark.slow
def test_scores_are_those_of_rows_that_count_whatever_the_token_mask(make_policy):
    """A new head scores 0, so the loss is the mean square of the rows' targets: here 1, 4 and 9, one row masked."""
    data = cases.batch(8)
    data["sample_mask"] = torch.tensor([1.0, 0, 1, 0, 0, 1, 0, 0])
    data["advantages"] = torch.tensor([1.0, 7, 2, 7, 7, 3, 7, 7])[:, None].expand(8, cases.WIDTH).contiguous()
    data["token_mask"] = torch.zeros_like(data["token_mask"])
    with make_policy("score") as policy:
        assert policy.train(data, ScoresLoss(), eval_mode=True)["loss"] == pytest.approx(14 / 3)
        assert policy.train(data, ScoresLoss())["grad_norm"][0] > 0
        data["sample_mask"] = torch.zeros(8)
        assert policy.train(data, ScoresLoss())["grad_norm"].tolist() == [0.0]  # no row counts: no step


@pytest.mark.slow
def test_values_are_those_of_tokens_in_the_loss(make_policy):
    data: BatchedDataDict[Any] = cases.batch(8)
    counted = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
    mean = (data["advantages"][:, 1:].square() * counted).sum() / counted.sum()
    with make_policy("value") as policy:
        assert policy.train(data, ValuesLoss())["loss"] == pytest.approx(float(mean), rel=1e-5)
        values = policy.get_values(data, positions="token_mask")["values"]
        assert ((values != 0) == (data["token_mask"] * torch.tensor([0.0] + [1.0] * (cases.WIDTH - 1)) != 0)).all()
        with pytest.raises(BatchError, match="sample_mask must be present"):
            policy.train(BatchedDataDict({k: v for k, v in data.items() if k != "sample_mask"}), ValuesLoss())


def test_a_language_head_cannot_be_new():
    with pytest.raises(ValidationError, match="head_init is zeros, but head=language"):
        PolicyConfig(model_name="m", head_init="zeros")
