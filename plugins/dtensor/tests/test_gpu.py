"""The dtensor worker on one GPU, compared with the oracle on the CPU."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.sections import GenerationConfig
from rlframework.generation.batch import generate
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.plugins.manager import create_manager
from rlframework.policy import profiling
from rlframework_conformance import cases
from rlframework_conformance.layouts import Layout
from rlframework_conformance.oracle import Oracle
from rlframework_conformance.policies import InspectedPolicy, run_config
from rlframework_dtensor.worker import DTensorPolicyWorker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"


@pytest.mark.parametrize("mode", ["padded", "dynamic", "packed"])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_scores_trains_and_generates(model_path, tokenizer, oracle, batch, mode, precision, tolerance):
    """fp32 on a GPU may use other kernels than on a CPU, so the tolerance is wider than contract 2."""
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
        generation_target="rlframework_transformers.engine:TransformersEngine",
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
        engine, settings = worker.generation.updated(), GenerationConfig(max_new_tokens=3)
        output = generate(engine, BatchedDataDict(prompts), settings, frozenset(), pad_id=0)
        assert output["output_ids"].device.type == "cpu"
        assert output["generation_lengths"].max() <= 3
    finally:
        worker.shutdown()


@pytest.mark.parametrize("parameters", [False, True])
def test_offloading_moves_memory_and_changes_no_result(model_path, tokenizer, oracle, batch, parameters):
    """The bytes are those of fp32 weights and of two moments each; a step onloads them and offloads them again."""
    worker = DTensorPolicyWorker(
        {
            "model_name": str(model_path),
            "train_global_batch_size": 8,
            "optimizer": {"lr": 1e-4},
            "offload": {"parameters": parameters, "optimizer": True},
        },
        tokenizer,
        context=WorkerContext(device="cuda"),
    )
    plain = oracle(lr=1e-4)
    numbers = sum(weight.numel() for weight in plain.model.parameters())
    try:
        for step in range(3):
            worker.prepare_for_training()
            right, result = plain.step(batch, "nll"), worker.train(batch, NLLLoss())
            assert float(result["global_loss"][0]) == pytest.approx(right.loss, rel=1e-3)
            held = torch.cuda.memory_allocated()
            moved = worker.offload_after_refit()
            assert torch.cuda.memory_allocated() < held, step
            if not parameters:
                assert moved["model"] >= 4 * numbers
                assert worker.prepare_for_training()["optimizer"] >= 8 * numbers
            torch.testing.assert_close(
                worker.get_logprobs(batch)["logprobs"], plain.logprobs(batch), rtol=1e-3, atol=1e-3
            )
    finally:
        worker.shutdown()


def test_worker_reports_its_gpu_and_its_trace_has_kernels(model_path, tokenizer, batch, tmp_path):
    """The UUID is NVML's; memory is the allocator's, in MiB; the trace has kernels and phases."""
    worker = DTensorPolicyWorker(
        {"model_name": str(model_path), "train_global_batch_size": 8}, tokenizer, context=WorkerContext(device="cuda")
    )
    try:
        worker.reset_peak_memory_stats()
        worker.start_profiling()
        worker.start_gpu_profiling()
        worker.train(batch, NLLLoss())
        worker.stop_gpu_profiling()
        path = worker.stop_profiling(str(tmp_path))
        info = worker.get_gpu_info()
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
        assert f"UUID: {worker.report_device_id()})" in listed
        assert info["device_name"] in listed
        assert 0 < info["memory_allocated_mb"] <= info["peak_memory_allocated_mb"] <= info["peak_memory_reserved_mb"]
        events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
        assert "kernel" in {event.get("cat") for event in events}
        assert profiling.BACKWARD in {event["name"] for event in events}
    finally:
        worker.shutdown()


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_a_mixture_of_experts_trains(tmp_path, precision, tolerance):
    """With the load-balancing loss and the grouped kernels that transformers uses on a GPU."""
    path, data = cases.model("experts", tmp_path), cases.batch()
    plain = Oracle(path, router_loss=0.5, max_grad_norm=None)
    worker = DTensorPolicyWorker(
        {
            "model_name": str(path),
            "train_global_batch_size": 8,
            "precision": precision,
            "router_aux_loss_coef": 0.5,
        },
        cases.tokenizer(),
        context=WorkerContext(device="cuda"),
    )
    try:
        result, right = worker.train(data, NLLLoss()), plain.step(data, "nll")
        assert float(result["global_loss"][0]) == pytest.approx(right.loss, rel=tolerance)
        assert float(result["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=tolerance)
    finally:
        worker.shutdown()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
@pytest.mark.parametrize("layout", ["data=2", "tensor=2", "tensor=2,sequence", "context=2"])
def test_two_devices_compute_what_one_program_does(tmp_path, layout, precision, tolerance):
    """Over NCCL, with FSDP's streams; the second step shows whether the first one's weights are everywhere."""
    path, batch = cases.model("untied", tmp_path), cases.batch()
    manager, plain = create_manager(), Oracle(path, lr=1e-4)
    keys = {"precision": precision, "batching": {"mode": "packed", "tokens": 40}}
    config = run_config("dtensor", path, Layout.parse(layout), manager=manager, device=DEVICE, **keys)
    with InspectedPolicy(config, cases.tokenizer(), manager, device=DEVICE) as policy:
        for _ in range(2):
            logprobs = policy.get_logprobs(batch)["logprobs"]
            torch.testing.assert_close(logprobs, plain.logprobs(batch), rtol=tolerance, atol=tolerance)
            right, result = plain.step(batch, "nll"), policy.train(batch, NLLLoss())
            assert float(result["loss"]) == pytest.approx(right.loss, rel=tolerance)
            assert float(result["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=tolerance)
