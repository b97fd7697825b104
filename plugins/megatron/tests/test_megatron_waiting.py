"""Waits for the device: none in the forward and backward passes of a step, whatever the number of microbatches."""

from __future__ import annotations

import pytest
from waiting_calls import waits_of_a_step

from rlframework_conformance import cases
from rlframework_megatron.worker import MegatronPolicyWorker


@pytest.fixture
def waits(tmp_path):
    """`waits(model, rows, **keys)`: the waiting calls of a step in microbatches of `rows` rows, by primitive."""

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
        return waits_of_a_step(worker)

    return count


OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("section", "checkpointing"), [({}, False), ({}, "selective"), (OVERLAPPED, "full")], ids=["", "selective", "full"]
)
def test_a_step_waits_once(waits, rows, section, checkpointing):
    found = waits("untied", rows, section, activation_checkpointing=checkpointing, precision="bfloat16")
    assert found["forward_backward"] == []
    assert len(found["clip_and_step"]) == 1, found  # the norm of the gradient
