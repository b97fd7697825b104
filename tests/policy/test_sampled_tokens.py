"""The difference between engine and policy over sampled tokens, by hand: which tokens count, and where none can."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframework import create_manager, load_config
from rlframework.algorithms.losses import ClippedPGLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.loss import LossInput
from rlframework.interfaces.policy_worker import SAMPLED_NOW, SampledDifference, SamplingBound
from rlframework.policy.client import Policy
from rlframework.policy.microbatching import SampledTokensCheck

BOUND = SamplingBound(mean=1.0, largest=3.0)


def rows(**more: torch.Tensor) -> dict[str, Any]:
    """Rows with sampled tokens at positions 2 and 3, 1 to 3, and in one that does not count; the engine says -2."""
    return {
        "token_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
        "generation_logprobs": torch.full((3, 4), -2.0),
        **more,
    }


def logprobs() -> torch.Tensor:
    """Of positions 1 to 3: off by 1 and 2 in the first row, 0, 3 and 0 in the second, 100 where nothing counts."""
    values = torch.tensor([[-102.0, -3.0, -4.0], [-2.0, 1.0, -2.0], [-102.0, -102.0, math.nan]])
    return values.requires_grad_()


@pytest.mark.parametrize(
    ("more", "total", "count", "largest"),
    [
        ({}, 6.0, 5, 3.0),
        ({SAMPLED_NOW: torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1], [1, 1, 1, 1]])}, 1.0, 3, 1.0),
        ({SAMPLED_NOW: torch.zeros(3, 4)}, 0.0, 0, 0.0),
        ({"prev_logprobs": torch.full((3, 4), -2.5)}, 2.5, 5, 0.5),  # of the weights that sampled
    ],
)
@pytest.mark.parametrize("sets", [False, True])
def test_sampled_tokens_that_count_are_compared(
    more: Any, total: float, count: int, largest: float, sets: bool
) -> None:
    """With token sets, the log-probability of the token itself is the first of each position."""
    found = logprobs()
    if sets:
        found = torch.stack((found, torch.full_like(found, -50.0)), dim=-1)
    metrics = SampledTokensCheck.metrics(found, rows(**more))
    assert not any(value.requires_grad for value in metrics.values())
    read = {name: float(value) for name, value in metrics.items()} | {"loss": 7.0}
    difference = SampledTokensCheck(BOUND).of_batch(read)
    assert difference == pytest.approx(SampledDifference(total / max(count, 1), largest, count, total > count))
    assert read == {"loss": 7.0}


@pytest.mark.parametrize(("mean", "largest", "withheld"), [(1.0, 3.0, False), (1.01, 0.0, True), (0.0, 3.01, True)])
def test_a_step_is_withheld_beyond_either_bound(mean: float, largest: float, withheld: bool) -> None:
    metrics = {"sampled_difference": 2 * mean, "sampled_tokens": 2.0, "sampled_difference_max": largest}
    assert SampledTokensCheck(BOUND).of_batch(metrics).withheld is withheld


@pytest.mark.parametrize("kind", LossInput)
def test_losses_without_comparable_log_probabilities_have_no_check(kind: LossInput) -> None:
    loss: Any = SimpleNamespace(input_type=kind)
    comparable = kind in (LossInput.LOGPROBS, LossInput.TOKEN_SETS)
    assert (SampledTokensCheck.of(BOUND, rows(), loss, same_temperature=True) is not None) == comparable
    assert SampledTokensCheck.of(BOUND, rows(), loss, same_temperature=False) is None
    assert SampledTokensCheck.of(None, rows(), loss, same_temperature=True) is None
    assert SampledTokensCheck.of(BOUND, {"token_mask": torch.ones(1, 2)}, loss, same_temperature=True) is None


@pytest.mark.slow
def test_evaluation_ends_with_the_batch_that_is_beyond_the_bound(tiny_llama: Path, tmp_path: Path) -> None:
    """Two batches of eight tokens: one token is off by 2 nats in the first, all by 0.5 in the second."""
    config = load_config(
        {
            "policy": {"model_name": str(tiny_llama), "train_global_batch_size": 2},
            "algorithm": {"name": "grpo"},
            "environment": {"name": "addition"},
            "worker_group": {"name": "inline"},
            "output_dir": str(tmp_path / "run"),
            "device": "cpu",
        }
    )
    policy = Policy(config, load_tokenizer(str(tiny_llama)), create_manager())
    off = torch.zeros(4, 5)
    off[0, 1], off[2:] = 2.0, 0.5
    rows: Any = {
        "input_ids": torch.full((4, 5), 3),
        "input_lengths": torch.full((4,), 5),
        "token_mask": torch.ones(4, 5),
        "sample_mask": torch.ones(4),
        "advantages": torch.ones(4, 5),
        "prev_logprobs": torch.full((4, 5), -2.0),
        "generation_logprobs": off - 2.0,
    }
    loss = ClippedPGLoss(ClippedPGLossConfig())
    with ExitStack() as stack:
        stack.callback(policy.shutdown)
        results = [
            policy.train(BatchedDataDict(rows), loss, eval_mode=True, sampling_bound=SamplingBound(mean, math.inf))
            for mean in (math.inf, 0.4)
        ]
    assert [result["sampled"] for result in results] == [
        SampledDifference(0.5, 2.0, 8.0, False),
        SampledDifference(0.5, 2.0, 8.0, True),
    ]
    assert [result["grad_norm"] for result in results] == [None, None]
