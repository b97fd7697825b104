"""The deepspeed worker on one GPU against the oracle on the CPU: what a CPU cannot show.

Each worker has a process of its own, because DeepSpeed is for one kind of device in a process. None of it has been run.
"""

from __future__ import annotations

from contextlib import contextmanager
from ctypes.util import find_library
from shutil import which

import pytest
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.plugins.manager import create_manager
from rlframework_conformance import cases
from rlframework_conformance.layouts import Layout
from rlframework_conformance.oracle import Oracle
from rlframework_conformance.policies import InspectedPolicy, run_config
from rlframework_deepspeed.config_checks import COMPILERS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
STAGES = (0, 1, 2, 3)
OFFLOADS = {
    "optimizer": (2, {"optimizer": True}, {}),
    "parameters": (3, {"parameters": True}, {}),
    "disk": (3, {}, {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}),
}
"""Stage, neutral keys, DeepSpeed's own."""

NEEDS_A_COMPILER = pytest.mark.skipif(
    any(which(name) is None for name in COMPILERS) or find_library("aio") is None, reason="needs g++, ninja and libaio"
)


@pytest.fixture
def path(tmp_path):
    return cases.model("untied", tmp_path)


@contextmanager
def opened(path, stage, zero=None, fp16=None, layout="data=1", **keys):
    manager = create_manager()
    section = {"zero_optimization": {"stage": stage, **(zero or {})}, "fp16": fp16 or {}}
    config = run_config(
        "deepspeed",
        path,
        Layout.parse(layout),
        manager=manager,
        device=DEVICE,
        apart=True,
        deepspeed=section,
        **keys,
    )
    with InspectedPolicy(config, cases.tokenizer(), manager, device=DEVICE) as policy:
        policy.prepare_for_training()
        yield policy


@pytest.mark.parametrize("mode", ["padded", "packed"])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1), ("float16", 0.02)])
@pytest.mark.parametrize("stage", STAGES)
def test_scores_and_trains(path, stage, precision, tolerance, mode):
    """fp32 on a GPU may use other kernels than the CPU, so the tolerance is wider than contract 2."""
    batch, plain = cases.batch(), Oracle(path)
    with opened(path, stage, precision=precision, batching={"mode": mode, "tokens": 40}) as policy:
        logprobs = policy.get_logprobs(batch)["logprobs"]
        torch.testing.assert_close(logprobs, plain.logprobs(batch), rtol=tolerance, atol=tolerance)
        for _ in range(3):
            right, result = plain.step(batch, "nll"), policy.train(batch, NLLLoss())
            assert float(result["loss"]) == pytest.approx(right.loss, rel=tolerance)
            assert float(result["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=tolerance)


@pytest.mark.parametrize("stage", STAGES)
def test_float16_skips_steps_until_the_loss_is_scaled_so_that_gradients_are_finite(path, stage):
    """A scale of 2 to the 40th overflows; DeepSpeed halves it, and in the end steps are taken."""
    scaling = {"initial_scale_power": 40, "hysteresis": 1}
    batch = cases.batch()
    with opened(path, stage, fp16=scaling, precision="float16", non_finite_gradients={"stop_after": 60}) as policy:
        results = [policy.train(batch, NLLLoss()) for _ in range(50)]
    assert results[0]["skipped"] == 1
    assert results[-1]["skipped"] == 0
    assert float(results[-1]["loss"]) < float(results[0]["loss"])


@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_that_are_reduced_on_another_stream_change_no_number(path, stage):
    """A default with several devices, where there is something to reduce; some parameters do not fit a bucket."""
    batch, plain = cases.batch(), Oracle(path)
    zero = {"overlap_comm": True, "reduce_bucket_size": 500}
    with opened(path, stage, zero, precision="float32", train_micro_batch_size=2) as policy:
        for _ in range(3):
            right, result = plain.step(batch, "nll"), policy.train(batch, NLLLoss())
            assert float(result["loss"]) == pytest.approx(right.loss, rel=1e-3)
            assert float(result["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=1e-3)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_no_number(path, mode):
    batch, plain = cases.batch(), Oracle(path)
    with opened(path, 3, precision="float32", activation_checkpointing=mode) as policy:
        right, result = plain.step(batch, "nll"), policy.train(batch, NLLLoss())
        assert float(result["loss"]) == pytest.approx(right.loss, rel=1e-3)
        assert float(result["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=1e-3)


@pytest.mark.parametrize("name", ["optimizer", "parameters", pytest.param("disk", marks=NEEDS_A_COMPILER)])
def test_what_is_offloaded_changes_no_number(path, tmp_path, name):
    stage, neutral, own = OFFLOADS[name]
    (tmp_path / "disk").mkdir()
    zero = {key: {**value, "nvme_path": str(tmp_path / "disk")} for key, value in own.items()}
    batch, plain = cases.batch(), Oracle(path)
    with opened(path, stage, zero, offload=neutral, precision="float32") as policy:
        for _ in range(3):
            right, result = plain.step(batch, "nll"), policy.train(batch, NLLLoss())
            assert float(result["loss"]) == pytest.approx(right.loss, rel=1e-3)
        torch.testing.assert_close(policy.get_logprobs(batch)["logprobs"], plain.logprobs(batch), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_moving_frees_the_bytes_that_it_tells(path, stage):
    """fp32 weights and two moments of each; a call that needs them brings them back."""
    batch, plain = cases.batch(), Oracle(path)
    numbers = sum(weight.numel() for weight in plain.model.parameters())
    with opened(path, stage, precision="float32") as policy:
        for _ in range(2):
            plain.step(batch, "nll")
            policy.train(batch, NLLLoss())
            (held,) = policy.get_gpu_info()
            assert policy.offload_after_refit()["model"] >= 4 * numbers
            (left,) = policy.get_gpu_info()
            assert left["memory_allocated_mb"] < held["memory_allocated_mb"]
            assert policy.prepare_for_training()["optimizer"] >= 8 * numbers
        torch.testing.assert_close(policy.get_logprobs(batch)["logprobs"], plain.logprobs(batch), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
@pytest.mark.parametrize(("stage", "layout"), [(1, "data=2"), (3, "data=2"), (2, "tensor=2"), (2, "context=2")])
def test_two_devices_compute_what_one_program_does(path, stage, layout, precision, tolerance):
    """Over NCCL; the second step shows whether the first one's weights are everywhere."""
    batch, plain = cases.batch(), Oracle(path, lr=1e-4)
    keys = {"precision": precision, "batching": {"mode": "packed", "tokens": 40}}
    with opened(path, stage, layout=layout, **keys) as policy:
        for _ in range(2):
            logprobs = policy.get_logprobs(batch)["logprobs"]
            torch.testing.assert_close(logprobs, plain.logprobs(batch), rtol=tolerance, atol=tolerance)
            right, result = plain.step(batch, "nll"), policy.train(batch, NLLLoss())
            assert float(result["loss"]) == pytest.approx(right.loss, rel=tolerance)
            assert float(result["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=tolerance)
