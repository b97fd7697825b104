"""Trainer and engine in two processes on one GPU, by CUDA IPC handles. Not yet run on a GPU."""

from __future__ import annotations

import pytest
import torch

from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.plugins.manager import create_manager
from rlframework.weight_sync.buffers import checksum, read_weight, write_weight
from rlframework_conformance import cases
from rlframework_conformance.layouts import Layout
from rlframework_conformance.policies import InspectedEngines, InspectedPolicy, run_config

HELD = "rlframework_conformance.inspected_worker:held_weights"
GATHERED = "rlframework_conformance.inspected_worker:gathered_weights"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_processes_share_weights_on_a_gpu(tmp_path, dtype):
    manager, model = create_manager(), cases.model("untied", tmp_path)
    generation = {"workers": {}, "refit": {"transport": "ipc", "dtype": dtype, "buffer_mb": 4096 / 2**20}}
    config = run_config(
        "dtensor", model, Layout(), manager=manager, device="cuda", folder=tmp_path, generation=generation, apart=True
    )
    tokenizer = load_tokenizer(str(model))
    with InspectedPolicy(config, tokenizer, manager, device="cuda") as policy:
        engines = InspectedEngines(config, policy, tokenizer, manager, device="cuda")
        try:
            for _ in range(2):
                assert engines.refitter.refit().transport == "ipc"
            held = engines.inspect(HELD)[0]
        finally:
            engines.shutdown()
        for name, weight in policy.inspect(GATHERED)[0].items():
            assert torch.equal(held[name], weight.to(held[name].dtype)), name
            assert held[name].dtype == getattr(torch, dtype)


def test_checksums_on_a_gpu_are_the_same_on_both_ends():
    weight = torch.randn(333, 77, device="cuda")
    raw = torch.zeros(weight.numel() * 2, dtype=torch.uint8, device="cuda")
    target = torch.empty(weight.shape, dtype=torch.bfloat16, device="cuda")
    assert write_weight(raw, weight, torch.bfloat16) == read_weight(raw, target) == checksum(raw)
    assert torch.equal(target, weight.to(torch.bfloat16))
    assert checksum(raw) != checksum(raw.roll(8))
