"""Training and moves wait for the device a constant number of times, counted on a device that computes on the CPU."""

from __future__ import annotations

import json

import pytest
from probe_forked import run_forked
from probe_waiting import exchange, move, swap, train

from rlframework.huggingface.model_directories import make_llama
from rlframework_conformance import cases
from rlframework_conformance.oracle import Oracle


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden": 32, "intermediate": 64, "layers": 2, "heads": 4, "kv_heads": 2}
    return make_llama(path, cases.tokenizer(), **sizes, tied=False, init_std=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["packed", "dynamic", "padded"])
def test_a_step_waits_once_whatever_the_number_of_microbatches(model, batches, mode):
    rows = batches(2)
    done = run_forked(train, model, mode, rows)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(steps) == len(rows)
    for step in steps:
        assert len(step["events"]) > 2
        assert step["events"] == ["copy", "forward"] * (len(step["events"]) // 2)  # the next after the launch of one
        assert step["alive"] <= 2
        assert len(step["waits"]) == 1, "\n".join(step["waits"])
        assert 0 < step["times"]["device_wait"] < step["times"]["train"]
    expected = Oracle(model).step(rows[0], "nll")
    assert steps[0]["loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert steps[0]["norm"] == pytest.approx(expected.grad_norm, rel=1e-5)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return cases.model("experts", tmp_path_factory.mktemp("mixture"))


@pytest.mark.slow
def test_routing_and_its_loss_wait_for_nothing(mixture, batches):
    """The load-balancing loss counts the choices of all layers and microbatches on the device."""
    (rows,) = batches(1)
    done = run_forked(train, mixture, "padded", [rows], 0.5)
    assert done.returncode == 0, done.stderr
    step = json.loads(done.stdout)
    assert len(step["waits"]) == 1, "\n".join(step["waits"])
    expected = Oracle(mixture, router_loss=0.5).step(rows, "nll")
    assert step["loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert step["norm"] == pytest.approx(expected.grad_norm, rel=1e-5)


@pytest.mark.slow
def test_expert_parallelism_waits_once_for_a_block(mixture):
    done = run_forked(exchange, mixture)
    assert done.returncode == 0, done.stderr
    waits = json.loads(done.stdout)
    assert len(waits) == 1, "\n".join(waits)


@pytest.mark.slow
def test_a_move_to_the_host_waits_once_for_the_model_and_once_for_the_moments_and_keeps_its_memory(model, batches):
    done = run_forked(move, model, batches(1)[0])
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    for each in (first, second):
        assert each["moved"] == first["moved"]
        assert all(size > 10_000 for size in first["moved"].values())
        assert len(each["there"]) == 2, "\n".join(each["there"])
        assert each["back"] == []
    assert first["addresses"] == second["addresses"]
    assert len(set(first["addresses"])) == len(first["addresses"])


@pytest.mark.slow
def test_swapping_the_reference_and_the_policy_does_not_wait(model, batches):
    done = run_forked(swap, model, batches(1)[0])
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[], []]
