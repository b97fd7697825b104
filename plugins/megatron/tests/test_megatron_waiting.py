"""Waits for the device: none in the forward and backward passes of a step, whatever the number of microbatches."""

from __future__ import annotations

import pytest
from waiting_calls import WaitingCalls

from rlframework.algorithms.losses import NLLLoss
from rlframework.conformance import cases
from rlframework_megatron.worker import MegatronPolicyWorker


@pytest.fixture
def waits(tmp_path, monkeypatch):
    """`waits(model, rows, **keys)`: the waiting calls of a step in microbatches of so many rows, by primitive."""

    def count(model, rows, section=None, **keys):
        path = cases.model(model, tmp_path)
        worker = MegatronPolicyWorker(
            {
                "model_name": str(path),
                "train_global_batch_size": 8,
                "train_micro_batch_size": rows,
                "batching": {"mode": "padded"},
                **keys,
            },
            cases.tokenizer(),
            backend_config=section or {},
        )
        calls = {}

        def counted(name, primitive):
            def call(first, *args, **kwargs):
                first = list(first) if name == "forward_backward" else first  # microbatches are made on the CPU
                with WaitingCalls() as calls[name]:
                    return primitive(first, *args, **kwargs)

            return call

        try:
            worker.train(cases.batch(), NLLLoss())
            for name in ("forward_backward", "clip_and_step"):
                monkeypatch.setattr(worker.engine, name, counted(name, getattr(worker.engine, name)))
            worker.train(cases.batch(), NLLLoss())
        finally:
            worker.shutdown()
        return {name: call.found for name, call in calls.items()}

    return count


OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("section", "checkpointing"), [({}, False), ({}, "selective"), (OVERLAPPED, "full")], ids=["", "selective", "full"]
)
def test_a_step_waits_once(waits, rows, section, checkpointing):
    found = waits("untied", rows, section, activation_checkpointing=checkpointing, precision="bfloat16")
    assert found["forward_backward"] == []
    assert len(found["clip_and_step"]) == 1, found  # the norm of the gradient
