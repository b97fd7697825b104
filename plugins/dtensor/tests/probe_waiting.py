"""A process that trains on the counting device, whose registration other tests in a process would notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import counting_device
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from rlframework.algorithms.losses import NLLLoss
from rlframework.conformance import cases
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_dtensor import experts
from rlframework_dtensor.worker import DTensorPolicyWorker


def train(model: Path, mode: str, batches: list[Any], router_loss: float = 0.0) -> None:
    """Print, for one optimizer step per batch: what waited, the number of forwards, loss and gradient norm."""
    counting_device.register()
    worker = DTensorPolicyWorker(
        {
            "model_name": str(model),
            "train_global_batch_size": batches[0].size,
            "train_micro_batch_size": 2,
            "batching": {"mode": mode, "tokens": 40},
            "router_aux_loss_coef": router_loss,
        },
        cases.tokenizer(),
        context=WorkerContext(rank=0, world_size=1, device=counting_device.NAME),
    )
    for batch in batches:
        with counting_device.counting() as counts:
            result = worker.train(batch, NLLLoss())
        found = {"waits": counts.waits, "forwards": counts.operations["embedding"]}
        assert result["grad_norm"] is not None
        found |= {"loss": float(result["global_loss"][0]), "norm": float(result["grad_norm"][0])}
        print(json.dumps(found))
    worker.shutdown()


def exchange(model: Path) -> None:
    """Print what waits in forward and backward of a block's experts with expert parallelism, on a single rank.

    Output and gradients must equal those of the block without it.
    """
    counting_device.register()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    experts.ALL_TO_ALL = lambda output, rows, *sizes, group: output.copy_(rows)  # type: ignore[assignment]
    whole: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    block = experts.experts_of(whole)[0]
    generator = torch.Generator().manual_seed(0)
    hidden, scores = torch.randn(6, 32, generator=generator), torch.rand(6, 2, generator=generator)
    chosen = torch.tensor([[0, 2], [2, 3], [0, 3], [2, 0], [3, 2], [2, 3]])  # expert 1 gets no token
    block(hidden, chosen, scores).square().sum().backward()
    expected = {name: weight.grad.clone() for name, weight in block.named_parameters()}
    output = block(hidden, chosen, scores)

    placed = block.to(counting_device.NAME)
    split = experts._ExpertParallelForward(placed, type(placed).forward, dist.group.WORLD)
    placed.zero_grad()
    given = [tensor.to(counting_device.NAME) for tensor in (hidden, chosen, scores)]
    with counting_device.counting() as counts:
        result = split(*given)
        result.square().sum().backward()
    torch.testing.assert_close(result.detach().cpu(), output, rtol=1e-5, atol=1e-6)
    for name, weight in placed.named_parameters():
        torch.testing.assert_close(weight.grad.cpu(), expected[name], rtol=1e-5, atol=1e-6)
    placed.zero_grad()
    split(*(tensor[:0] for tensor in given)).sum().backward()  # no token arrives
    assert all(weight.grad is not None and not weight.grad.cpu().any() for weight in placed.parameters())
    print(json.dumps(counts.waits))
