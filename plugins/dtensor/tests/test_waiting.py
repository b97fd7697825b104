"""Training waits for the device once in an optimizer step, counted on a device that computes on the CPU."""

from __future__ import annotations

import json

import pytest
from probe_forked import run_forked
from probe_waiting import train

from rlframework.conformance import cases
from rlframework.conformance.oracle import Oracle
from rlframework.huggingface.model_directories import make_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden": 32, "intermediate": 64, "layers": 2, "heads": 4, "kv_heads": 2}
    return make_llama(path, cases.tokenizer(), **sizes, tied=False, init_std=0.2)


@pytest.mark.parametrize("mode", ["packed", "dynamic", "padded"])
def test_a_step_waits_once_whatever_the_number_of_microbatches(model, batches, mode):
    rows = batches(2)
    done = run_forked(train, model, mode, rows)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(steps) == len(rows)
    for step in steps:
        assert step["forwards"] > 1
        assert len(step["waits"]) == 1, "\n".join(step["waits"])
        assert 0 < step["times"]["device_wait"] < step["times"]["train"]
    expected = Oracle(model).step(rows[0], "nll")
    assert steps[0]["loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert steps[0]["norm"] == pytest.approx(expected.grad_norm, rel=1e-5)
