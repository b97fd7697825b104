"""Waits for the device: none in the forward and backward passes of a step, one before the optimizer's."""

from __future__ import annotations

import pytest
from waiting_calls import waits_of_a_step

from rlframework_conformance import cases
from rlframework_deepspeed.worker import DeepSpeedPolicyWorker


@pytest.fixture
def waits(tmp_path):
    """`waits(rows, stage, **keys)`: the waiting calls of a step in microbatches of `rows` rows, by primitive."""

    def count(rows, stage, **keys):
        path = cases.model("untied", tmp_path)
        worker = DeepSpeedPolicyWorker(
            {
                "model_name": str(path),
                "train_global_batch_size": 8,
                "train_micro_batch_size": rows,
                "batching": {"mode": "padded"},
                **keys,
            },
            cases.tokenizer(),
            backend_config={"zero_optimization": {"stage": stage}},
        )
        worker.engine._replace_padded = True  # as on a GPU
        return waits_of_a_step(worker)

    return count


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("stage", "precision"), [(0, "float32"), *((s, "bfloat16") for s in (1, 2, 3))])
def test_a_step_waits_once(waits, rows, stage, precision):
    """DeepSpeed reads the norm again, which is in CPU memory then. In stage 0 with bfloat16 it waits more often."""
    found = waits(rows, stage, precision=precision)
    assert found["forward_backward"] == []
    assert len([call for call in found["clip_and_step"] if "isfinite(norm)" not in call]) == 1, found["clip_and_step"]
