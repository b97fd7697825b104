"""A process that trains on the counting device, whose registration other tests in a process would notice."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import counting_device
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from rlframework.algorithms.losses import NLLLoss
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.microbatches import on_demand
from rlframework_conformance import cases
from rlframework_dtensor import experts
from rlframework_dtensor.worker import DTensorPolicyWorker


def build(model: Path, mode: str, batch: Any, router_loss: float = 0.0) -> DTensorPolicyWorker:
    """A worker on the counting device."""
    counting_device.register()
    return DTensorPolicyWorker(
        {
            "model_name": str(model),
            "train_global_batch_size": batch.size,
            "train_micro_batch_size": 2,
            "batching": {"mode": mode, "tokens": 40},
            "router_aux_loss_coef": router_loss,
        },
        cases.tokenizer(),
        context=WorkerContext(rank=0, world_size=1, device=counting_device.NAME),
    )


def train(model: Path, mode: str, batches: list[Any], router_loss: float = 0.0) -> None:
    """Print per optimizer step, one a batch: what waited, loss, gradient norm, times, order of copies and forwards.

    `alive`: the most microbatches on the device at a time.
    """
    worker = build(model, mode, batches[0], router_loss)
    events: list[str] = []
    worker.engine.model.get_input_embeddings().register_forward_hook(lambda *_: events.append("forward"))
    copies: list[weakref.ref[Any]] = []
    alive: list[int] = []
    to_device = on_demand.to_device

    def noted(*arguments: Any) -> Any:
        made = to_device(*arguments)
        copies.append(weakref.ref(made))
        alive.append(sum(copy() is not None for copy in copies))
        events.append("copy")
        return made

    on_demand.to_device = noted
    for batch in batches:
        events.clear()
        with counting_device.counting() as counts:
            result = worker.train(batch, NLLLoss())
        found = {"waits": counts.waits, "events": events, "alive": max(alive)}
        assert result["grad_norm"] is not None
        found |= {"loss": float(result["global_loss"][0]), "norm": float(result["grad_norm"][0])}
        print(json.dumps(found | {"times": result["times"]}))
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


def move(model: Path, batch: Any) -> None:
    """Print, for two moves to the CPU and back: bytes, what waited each way, and the addresses in CPU memory."""
    worker = build(model, "packed", batch)
    worker.train(batch, NLLLoss())
    before = weights(worker)
    for _ in range(2):
        with counting_device.counting() as there:
            moved = worker.offload_after_refit()
        states = worker.engine._optimizer.state.values()
        addresses = [value.data_ptr() for state in states for value in state.values()]
        addresses += [parameter.data_ptr() for parameter in worker.engine.model.parameters()]
        with counting_device.counting() as back:
            worker.prepare_for_training()
        print(json.dumps({"moved": moved, "there": there.waits, "back": back.waits, "addresses": addresses}))
    assert all(torch.equal(value, before[name]) for name, value in weights(worker).items())
    worker.shutdown()


def swap(model: Path, batch: Any) -> None:
    """Print what waited in two swaps of the reference and the policy."""
    worker = build(model, "packed", batch)
    start = weights(worker)
    worker.train(batch, NLLLoss())
    trained = weights(worker)
    for _ in range(2):
        with counting_device.counting() as counts, worker.use_reference_model():
            waits, counts.waits = counts.waits, []
            assert all(torch.equal(value, start[name]) for name, value in weights(worker).items())
            counts.waits = waits
        print(json.dumps(counts.waits))
        assert all(torch.equal(value, trained[name]) for name, value in weights(worker).items())
    worker.shutdown()


def weights(worker: DTensorPolicyWorker) -> dict[str, torch.Tensor]:
    """Copies of the weights on the CPU."""
    return {name: parameter.detach().cpu().clone() for name, parameter in worker.engine.model.named_parameters()}
