"""Calls wait for the device once, counted on a device that computes on the CPU.

While a GPU computes, the program queues what comes next; each wait lets that queue run empty.
"""

from __future__ import annotations

import json

import pytest
from probe_forked import run_forked
from probe_waiting import score, train

from rlframework.conformance import cases
from rlframework.conformance.oracle import Oracle
from rlframework.huggingface.model_directories import make_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden": 32, "intermediate": 64, "layers": 2, "heads": 4, "kv_heads": 2}
    return make_llama(path, cases.tokenizer(), **sizes, tied=False, init_std=0.2)


def counted(work, *arguments):
    """What `work` printed, run in a process of its own."""
    done = run_forked(work, *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("mode", ["packed", "dynamic", "padded"])
def test_a_step_waits_once_whatever_the_number_of_microbatches(model, batches, mode):
    """For the gradient norm, which decides whether the step is taken."""
    rows = batches(2)
    steps = counted(train, model, mode, rows, {"max_grad_norm": 0.1})
    assert len(steps) == len(rows)
    for step in steps:
        assert step["forwards"] > 1
        assert len(step["waits"]) == 1, "\n".join(step["waits"])
    expected = Oracle(model, max_grad_norm=0.1).step(rows[0], "nll")
    assert steps[0]["loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert steps[0]["norm"] == pytest.approx(expected.grad_norm, rel=1e-5)


@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_scoring_and_evaluating_wait_once_a_call(model, batches, mode):
    """For what they return: once for each kind of result, so twice for top-k tokens, their logits and their ids.

    The swap of the reference's weights between host and device is not in this count.
    """
    (rows,) = batches(1)
    logprobs, topk, reference, evaluated = counted(score, model, mode, [rows], {})
    reference["waits"] = [wait for wait in reference["waits"] if "state.py" not in wait]
    for call, waits in ((logprobs, 1), (topk, 2), (reference, 1), (evaluated, 1)):
        assert call["forwards"] > 1
        assert len(call["waits"]) <= waits, "\n".join(call["waits"])
    assert evaluated["loss"] == pytest.approx(Oracle(model).step(rows, "nll").loss, rel=1e-5)
