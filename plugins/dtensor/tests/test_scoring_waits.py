"""Scoring and evaluation wait for the device once a call, counted on a device that computes on the CPU.

While a GPU computes, the program queues what comes next; each wait lets that queue run empty.
"""

from __future__ import annotations

import json

import pytest
from probe_forked import run_forked
from probe_scoring_waits import score

from rlframework.huggingface.model_directories import make_llama
from rlframework_conformance import cases
from rlframework_conformance.oracle import Oracle


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_a_call_waits_once_for_each_kind_of_result(tmp_path, batches, mode):
    """Top-k tokens are two: logits and ids. The reference's swap between host and device is not in its count."""
    sizes = {"hidden": 32, "intermediate": 64, "layers": 2, "heads": 4, "kv_heads": 2}
    model = make_llama(tmp_path, cases.tokenizer(), **sizes, tied=False, init_std=0.2)
    (rows,) = batches(1)
    done = run_forked(score, model, mode, rows)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name, call in found.items():
        waits = [wait for wait in call["waits"] if "state.py" not in wait]
        assert call["forwards"] > 1
        assert len(waits) <= (2 if name == "get_topk_logits" else 1), "\n".join(waits)
    assert found["evaluate"]["loss"] == pytest.approx(Oracle(model).step(rows, "nll").loss, rel=1e-5)
