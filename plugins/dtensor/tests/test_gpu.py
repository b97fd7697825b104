"""The dtensor worker on one GPU against the oracle on the CPU."""

from __future__ import annotations

import pytest
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.config.sections import GenerationConfig
from rlframework.distributed.batched_data_dict import BatchedDataDict
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_dtensor.worker import DTensorPolicyWorker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("mode", ["padded", "dynamic", "packed"])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_scores_trains_and_generates(model_path, tokenizer, oracle, batch, mode, precision, tolerance):
    """fp32 on a GPU may use other kernels than the CPU, so the tolerance is wider than contract 2."""
    worker = DTensorPolicyWorker(
        {
            "model_name": str(model_path),
            "train_global_batch_size": 8,
            "precision": precision,
            "batching": {"mode": mode, "tokens": 40},
        },
        tokenizer,
        context=WorkerContext(device="cuda"),
        generation=GenerationConfig(max_new_tokens=3),
        generation_target="rlframework.generation.transformers_engine:TransformersEngine",
    )
    plain = oracle(max_grad_norm=None)
    try:
        logprobs = worker.get_logprobs(batch)["logprobs"]
        torch.testing.assert_close(logprobs, plain.logprobs(batch), rtol=tolerance, atol=tolerance)
        right = plain.step(batch, "nll")
        result = worker.train(batch, NLLLoss())
        assert float(result["global_loss"][0]) == pytest.approx(right.loss, rel=tolerance)
        assert float(result["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=tolerance)
        prompts = {
            "input_ids": batch["input_ids"][:2, :3],
            "input_lengths": torch.tensor([3, 3]),
            "seeds": torch.tensor([1, 2]),
        }
        output = worker.generate(BatchedDataDict(prompts))
        assert output["output_ids"].device.type == "cpu"
        assert output["generation_lengths"].max() <= 3
    finally:
        worker.shutdown()
