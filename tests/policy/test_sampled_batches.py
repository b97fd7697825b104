"""The result of `train` for sampled tokens of several global batches."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from rlframework import create_manager, load_config
from rlframework.algorithms.losses import ClippedPGLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.policy_worker import SampledDifference, SamplingBound
from rlframework.policy.client import Policy


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
