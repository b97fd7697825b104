"""The megatron worker on GPUs against the oracle on the CPU: what a CPU cannot show. None of it has been run."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.plugins.manager import create_manager
from rlframework.policy.trained_weights import open_saved
from rlframework_conformance import cases
from rlframework_conformance.layouts import Layout
from rlframework_conformance.oracle import Oracle
from rlframework_conformance.policies import InspectedPolicy, run_config
from rlframework_megatron import cpu
from rlframework_megatron.config import compiles
from rlframework_megatron.worker import MegatronPolicyWorker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
DISTRIBUTED = {"distributed_optimizer": True}
OVERLAPPED = DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
FUSED = {"fused_activation": True}
PACKED = {"batching": {"mode": "packed", "tokens": 40}}


@pytest.fixture
def path(tmp_path):
    return cases.model("untied", tmp_path)


def make_worker(path, section=None, device="cuda", init_reference_model=True, **keys):
    return MegatronPolicyWorker(
        {"model_name": str(path), "train_global_batch_size": 8, "optimizer": {"lr": 1e-4}, **keys},
        load_tokenizer(str(path)),
        init_reference_model=init_reference_model,
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
@pytest.mark.parametrize("section", [{}, DISTRIBUTED, OVERLAPPED], ids=["plain", "distributed", "overlapped"])
def test_scores_and_trains(path, mode, precision, tolerance, section):
    """fp32 on a GPU may use other kernels than the CPU, so the tolerance is wider than contract 2."""
    worker = make_worker(path, section, precision=precision, batching={"mode": mode, "tokens": 40})
    try:
        trains_alike(worker, Oracle(path, lr=1e-4), cases.batch(), tolerance)
    finally:
        worker.shutdown()


@pytest.mark.parametrize("name", ["tied", "norms_of_heads", "experts"])
@pytest.mark.parametrize("checkpointing", [False, "selective", "full"])
def test_other_models_train_with_and_without_recomputation(tmp_path, name, checkpointing):
    path = cases.model(name, tmp_path)
    worker = make_worker(path, activation_checkpointing=checkpointing)
    try:
        trains_alike(worker, Oracle(path, lr=1e-4), cases.batch(), 1e-3)
    finally:
        worker.shutdown()


@pytest.mark.skipif(not compiles(), reason="needs Triton and a C compiler")
@pytest.mark.parametrize("checkpointing", [False, "selective", "full"])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_a_fused_activation_computes_the_same(path, precision, tolerance, checkpointing):
    worker = make_worker(path, FUSED, precision=precision, activation_checkpointing=checkpointing, **PACKED)
    try:
        trains_alike(worker, Oracle(path, lr=1e-4), cases.batch(), tolerance)
    finally:
        worker.shutdown()


@pytest.mark.parametrize("checkpointing", [False, "selective", "full"])
@pytest.mark.parametrize("section", [{}, OVERLAPPED], ids=["plain", "overlapped"])
def test_no_microbatch_waits_for_the_device(path, monkeypatch, section, checkpointing):
    """A copy to the host, or a result whose shape depends on values, raises."""
    keys = {"precision": "bfloat16", "activation_checkpointing": checkpointing, "train_micro_batch_size": 2}
    worker = make_worker(path, section, **keys)
    primitive = worker.engine.forward_backward

    def forward_backward(*args, **keys):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return primitive(*args, **keys)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    try:
        worker.train(cases.batch(), NLLLoss())  # kernels are loaded
        monkeypatch.setattr(worker.engine, "forward_backward", forward_backward)
        worker.train(cases.batch(), NLLLoss())
    finally:
        worker.shutdown()


@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine")
@pytest.mark.parametrize("name", ["tied", "norms_of_heads", "experts"])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_layers_of_transformer_engine_compute_what_those_of_megatron_core_do(tmp_path, name, precision, tolerance):
    path, weights = cases.model(name, tmp_path), []
    for wanted in ("true", "false"):
        worker = make_worker(path, {"transformer_engine": wanted}, precision=precision)
        try:
            assert any("transformer_engine" in type(one).__module__ for one in worker.engine.chunks[0].modules()) == (
                wanted == "true"
            )
            weights.append({name: weight.clone() for name, weight in weights_of(worker)})
            trains_alike(worker, Oracle(path, lr=1e-4), cases.batch(), tolerance)
        finally:
            worker.shutdown()
    assert all(torch.equal(weights[0][name], weight) for name, weight in weights[1].items())


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


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("section", [{}, DISTRIBUTED], ids=["plain", "distributed"])
def test_what_moves_to_cpu_memory_is_freed_and_comes_back_to_the_bit(path, section, precision):
    """Weights, two moments and, in bfloat16, fp32 weights; buffers of gradients are freed without a copy."""
    stays, leaves = (make_worker(path, section, precision=precision, init_reference_model=False) for _ in range(2))
    numbers = sum(parameter.numel() for parameter in leaves.engine.chunks[0].parameters())
    bytes_each = 4 if precision == "float32" else 2
    copies = 2 if precision == "float32" else 3
    try:
        for seed in range(3):
            batch = cases.batch(seed=seed)
            for worker in (stays, leaves):
                worker.train(batch, NLLLoss())
            held = torch.cuda.memory_allocated()
            sent = leaves.offload_before_refit()
            assert sent["optimizer"] == 4 * copies * numbers
            for (name, weight), (_, wanted) in zip(weights_of(leaves), weights_of(stays), strict=True):
                assert weight.is_cuda
                assert torch.equal(weight, wanted), name
            sent = leaves.offload_after_refit()
            assert sent["model"] >= bytes_each * numbers
            assert held - torch.cuda.memory_allocated() >= (bytes_each + 4 + 4 * copies) * numbers
            if seed:  # the other time by itself, in the call
                assert leaves.prepare_for_training()["optimizer"] == 4 * copies * numbers
            scored, wanted = (worker.get_logprobs(batch)["logprobs"] for worker in (leaves, stays))
            assert torch.equal(scored, wanted)
    finally:
        for worker in (stays, leaves):
            worker.shutdown()


def weights_of(worker):
    return worker.engine.gather_weights(worker.engine.weight_specs())


@pytest.mark.parametrize("section", [{}, DISTRIBUTED], ids=["plain", "distributed"])
def test_a_native_checkpoint_of_a_gpu_goes_on_at_a_worker_on_the_cpu(path, tmp_path, section):
    """fp32 main weights and moments are those that the GPU had, to the bit; sent away or not."""
    (tmp_path / "native").mkdir()
    worker = make_worker(path, section, precision="bfloat16")
    try:
        worker.train(cases.batch(), NLLLoss())
        worker.offload_after_refit()
        worker.engine.save_native(tmp_path / "native", optimizer=True)
        wanted = {name: (one.exp_avg.cpu(), one.exp_avg_sq.cpu()) for name, one in worker.engine.gather_moments()}
        weights = {name: weight.cpu() for name, weight in weights_of(worker)}
    finally:
        worker.shutdown()
    on_cpu = make_worker(path, section, device="cpu", precision="bfloat16")
    try:
        on_cpu.engine.load_native(tmp_path / "native", optimizer=True)
        for name, weight in weights_of(on_cpu):
            assert torch.equal(weight, weights[name]), name
        for name, moments in on_cpu.engine.gather_moments():
            assert torch.equal(moments.exp_avg, wanted[name][0]), name
            assert torch.equal(moments.exp_avg_sq, wanted[name][1]), name
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
