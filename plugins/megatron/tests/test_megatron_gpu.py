"""The megatron worker on GPUs against the oracle on the CPU: what a CPU cannot show. None of it has been run."""

from __future__ import annotations

import pytest
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.conformance import cases
from rlframework.conformance.layouts import Layout
from rlframework.conformance.oracle import Oracle
from rlframework.conformance.policies import InspectedPolicy, run_config
from rlframework.data.tokenizer import load_tokenizer
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.plugins.manager import create_manager
from rlframework.policy.saved import open_saved
from rlframework_megatron import cpu
from rlframework_megatron.worker import MegatronPolicyWorker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
DISTRIBUTED = {"distributed_optimizer": True}
OVERLAPPED = DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
PACKED = {"batching": {"mode": "packed", "tokens": 40}}


@pytest.fixture
def path(tmp_path):
    return cases.model("untied", tmp_path)


def make_worker(path, section=None, device="cuda", **keys):
    return MegatronPolicyWorker(
        {"model_name": str(path), "train_global_batch_size": 8, "optimizer": {"lr": 1e-4}, **keys},
        load_tokenizer(str(path)),
        context=WorkerContext(device=device),
        backend_config=section or {},
    )


def trains_alike(worker, plain, batch, tolerance, steps=3):
    """Log-probabilities, and the loss and the gradient's norm of each step."""
    logprobs = worker.get_logprobs(batch)["logprobs"]
    torch.testing.assert_close(logprobs, plain.logprobs(batch), rtol=tolerance, atol=tolerance)
    for _ in range(steps):
        right, result = plain.step(batch, "nll"), worker.train(batch, NLLLoss())
        assert float(result["global_loss"][0]) == pytest.approx(right.loss, rel=tolerance)
        assert float(result["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=tolerance)


def test_the_adapter_of_the_cpu_leaves_cuda_alone():
    before = torch.cuda.current_device, torch.cuda.Stream, torch.distributed.all_to_all_single
    with cpu.on(CUDA):
        assert (torch.cuda.current_device, torch.cuda.Stream, torch.distributed.all_to_all_single) == before
        assert torch.zeros(1, device="cuda").is_cuda
        assert torch.zeros(1).cuda().is_cuda


@pytest.mark.parametrize("mode", ["padded", "dynamic", "packed"])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
@pytest.mark.parametrize("section", [{}, DISTRIBUTED], ids=["plain", "distributed"])
def test_scores_and_trains(path, mode, precision, tolerance, section):
    """fp32 on a GPU may use other kernels than the CPU, so the tolerance is wider than contract 2."""
    worker = make_worker(path, section, precision=precision, batching={"mode": mode, "tokens": 40})
    try:
        trains_alike(worker, Oracle(path, lr=1e-4), cases.batch(), tolerance)
    finally:
        worker.shutdown()


@pytest.mark.parametrize("name", ["tied", "norms_of_heads", "experts"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_other_models_train_with_and_without_recomputation(tmp_path, name, checkpointing):
    path = cases.model(name, tmp_path)
    worker = make_worker(path, activation_checkpointing=checkpointing)
    try:
        trains_alike(worker, Oracle(path, lr=1e-4), cases.batch(), 1e-3)
    finally:
        worker.shutdown()


@pytest.mark.parametrize("section", [{}, DISTRIBUTED], ids=["plain", "distributed"])
def test_a_checkpoint_goes_on_at_a_worker_on_the_cpu(path, tmp_path, section):
    """fp32 main weights and moments are those that the GPU had, to the bit."""

    def paths(name):
        return str(tmp_path / name / "model"), str(tmp_path / name / "optimizer")

    batch = cases.batch()
    worker = make_worker(path, section, precision="bfloat16")
    try:
        worker.train(batch, NLLLoss())
        worker.save_checkpoint(*paths("gpu"))
    finally:
        worker.shutdown()
    on_cpu = make_worker(path, section, device="cpu")
    try:
        on_cpu.load_checkpoint(*paths("gpu"))
        on_cpu.save_checkpoint(*paths("cpu"))
        for written, again in zip(paths("gpu"), paths("cpu"), strict=True):
            with open_saved(written) as right, open_saved(again) as found:
                assert sorted(found) == sorted(right)
                assert all(torch.equal(found[name], right[name]) for name in right)
    finally:
        on_cpu.shutdown()


LAYOUTS = [
    ("data=2", OVERLAPPED, {}),
    ("data=2", DISTRIBUTED, PACKED),
    ("tensor=2", {}, {}),
    ("tensor=2,sequence", {}, PACKED),
    ("context=2", {}, PACKED),
    ("pipeline=2", {}, {}),
]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
@pytest.mark.parametrize(("layout", "section", "keys"), LAYOUTS, ids=str)
def test_two_devices_compute_what_one_program_does(path, layout, section, keys, precision, tolerance):
    """Over NCCL, with streams that the CPU does not have."""
    manager, batch, plain = create_manager(), cases.batch(), Oracle(path, lr=1e-4)
    config = run_config(
        "megatron",
        path,
        Layout.parse(layout),
        manager=manager,
        device="cuda",
        megatron=section,
        precision=precision,
        **keys,
    )
    with InspectedPolicy(config, cases.tokenizer(), manager, device="cuda") as policy:
        for _ in range(3):
            logprobs = policy.get_logprobs(batch)["logprobs"]
            torch.testing.assert_close(logprobs, plain.logprobs(batch), rtol=tolerance, atol=tolerance)
            right, result = plain.step(batch, "nll"), policy.train(batch, NLLLoss())
            assert float(result["loss"]) == pytest.approx(right.loss, rel=tolerance)
            assert float(result["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=tolerance)
