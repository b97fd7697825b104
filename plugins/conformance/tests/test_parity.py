"""Parity: a correct backend agrees with the oracle, a broken one is reported with the place where it diverges."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from causal_kinds import KINDS, tiny_model

from rlframework.algorithms.losses import NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework_conformance import cases
from rlframework_conformance.measure import Measurement
from rlframework_conformance.parity import oracle_policy
from rlframework_conformance.parity.compare import compare_with_oracle, farthest, loss_measured
from rlframework_conformance.parity.oracle_policy import oracle_outputs, oracle_step_with
from rlframework_conformance.parity.outcome import (
    LOADED,
    LOSS,
    NORM,
    UPDATE,
    WEIGHTS,
    Candidate,
    Outcome,
)
from rlframework_conformance.parity.parity_report import notes
from rlframework_conformance.parity.scenario import Scenario, new_oracle, random_scenario
from rlframework_conformance.parity.update import Start, is_informative

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("wide_terminal")]

TENSOR = "model.layers.1.mlp.up_proj.weight"


def outcome_of(backend: str, scenario: Scenario, manager, folder: Path) -> Outcome:
    return compare_with_oracle(scenario, Candidate(backend), manager=manager, folder=folder, named=True)


@pytest.mark.parametrize("kind", ["nll", "pg"])
def test_a_sound_backend_agrees(kind, model, manager, tmp_path):
    outcome = outcome_of("dtensor", random_scenario(kind, model, steps=3, rows=5), manager, tmp_path)
    assert outcome.verdict == "agrees"
    assert outcome.divergence is None
    assert set(outcome.measurements) == set(outcome.checked)


def test_the_tensor_whose_update_is_wrong_is_named_with_its_step(model, manager, tmp_path):
    outcome = outcome_of("small_update", random_scenario("nll", model, steps=3, rows=8), manager, tmp_path)
    assert outcome.fails
    assert "weights" in outcome.beyond
    divergence = outcome.divergence
    assert (divergence.quantity, divergence.step) == (WEIGHTS, 2)
    assert (divergence.tensor, divergence.tensor_step, divergence.tensors, divergence.of) == (TENSOR, 2, 1, 21)
    # half of the second of two steps of similar size is missing
    assert divergence.tensor_error == pytest.approx(0.25, abs=0.05)
    worst, note = notes([outcome])
    assert worst.startswith(f"small_update:data=1 float32, nll: the worst tensor is {TENSOR} (error ")
    assert note.startswith("small_update:data=1 float32, nll: first divergence: weights, " + TENSOR + " in step 2")


RATES = (1e-6, 1e-4, 1e-2)


def at_rate(model: Path, lr: float, steps: int = 20, kind: str = "nll") -> Scenario:
    return replace(random_scenario(kind, model, steps=steps, rows=8), lr=lr)


@pytest.mark.parametrize("kind", ["nll", "pg"])
@pytest.mark.parametrize("lr", RATES)
def test_a_sound_backend_agrees_at_any_learning_rate(kind, lr, model, manager, tmp_path):
    outcome = outcome_of("dtensor", at_rate(model, lr, kind=kind), manager, tmp_path)
    assert outcome.verdict == "agrees"
    update = outcome.measurements[UPDATE]
    assert update.error < 2e-4  # far below 5e-3, the tolerance for engines that compute differently


@pytest.mark.parametrize("name", ["tied", "learned_positions"])
def test_a_sound_backend_agrees_where_gradients_are_rounding(name, manager, tmp_path):
    """The bias of attention keys has only rounding as gradient, yet AdamW moves it by the learning rate."""
    outcome = outcome_of("dtensor", at_rate(cases.model(name, tmp_path), 1e-4, 2), manager, tmp_path)
    assert outcome.measurements[UPDATE].error < 2e-4


@pytest.mark.parametrize(
    ("mutant", "lr", "error"),
    [
        ("update_sign", 1e-6, 2.0),
        ("update_sign", 1e-2, 2.0),
        ("update_too_small", 1e-5, 0.02),
        ("update_too_small", 1e-2, 0.02),
    ],
)
def test_a_wrong_update_is_told_at_any_learning_rate(mutant, lr, error, model, manager, tmp_path):
    candidate = Candidate("dtensor", mutant=mutant)
    outcome = compare_with_oracle(at_rate(model, lr, 1), candidate, manager=manager, folder=tmp_path, named=True)
    assert outcome.fails
    assert UPDATE in outcome.beyond
    assert outcome.measurements[UPDATE].error == pytest.approx(error, rel=0.2)
    assert (outcome.divergence.quantity, outcome.divergence.step) == (WEIGHTS, 1)
    assert outcome.divergence.tensor_error == pytest.approx(error, rel=0.2)


def test_an_update_that_rounding_hides_is_said_not_to_be_known(model, manager, tmp_path):
    outcome = outcome_of("dtensor", at_rate(model, 1e-9, 1), manager, tmp_path)
    assert UPDATE not in outcome.measurements
    (note,) = list(notes([outcome]))
    assert note.endswith("so the update could not be checked")


def started(gradient: list[float], weights: list[float]) -> Start:
    return Start.of({"w": torch.tensor(weights)}, {"w": torch.tensor(gradient)})


def test_elements_whose_gradient_is_rounding_are_not_compared():
    start = started([1.0, 1e-4, -1.0, 0.0], [0.0] * 4)
    (found,) = start.tensors({"w": torch.tensor([0.9, 5.0, 1.0, 5.0])}, {"w": torch.tensor([1.0, -1.0, 1.0, 0.0])}, 1)
    assert found.error == pytest.approx(0.1 / math.sqrt(2), rel=1e-5)
    assert not found.holds


def test_a_tensor_whose_whole_gradient_is_rounding_is_not_compared():
    weights = {"w": torch.zeros(2), "bias": torch.zeros(2)}
    start = Start.of(weights, {"w": torch.ones(2), "bias": torch.tensor([1e-8, -2e-8])})
    assert [found.quantity for found in start.tensors(weights, weights, 1)] == ["w"]


@pytest.mark.parametrize("gradients", [{}, {"w": torch.zeros(2)}])
def test_where_nothing_should_move_whatever_moves_is_told(gradients):
    start = Start.of({"w": torch.tensor([1.0, 2.0])}, gradients)
    assert start.whole(start.weights, start.weights, 1).holds
    moved = start.whole({"w": torch.tensor([1.0, 2.00001])}, start.weights, 1)
    assert not moved.holds
    assert is_informative(moved)


def test_rounding_of_the_weights_is_allowed_beside_the_limit():
    """One unit in the last place of a weight of 1 is 12% of a step of 1e-6."""
    start, step = started([1.0], [1.0]), 1e-6
    right, next_to_it = torch.tensor([1.0]) + step, torch.tensor([1.0]) + step + 2**-23
    (found,) = start.tensors({"w": next_to_it}, {"w": right}, 1)
    assert found.error > 0.1
    assert found.holds
    assert not start.tensors({"w": torch.tensor([1.0]) - step}, {"w": right}, 1)[0].holds


def test_a_tensor_that_was_loaded_wrongly_is_named_before_the_first_step(model, manager, tmp_path):
    divergence = outcome_of("misloaded", random_scenario("nll", model, steps=1, rows=8), manager, tmp_path).divergence
    assert (divergence.quantity, divergence.step, divergence.tensor, divergence.tensors) == (LOADED, 0, TENSOR, 1)
    assert "(error of the loaded weight" in str(divergence)


def test_a_norm_that_clipping_hides_from_the_weights_is_told(model, manager, tmp_path):
    outcome = outcome_of("double_gradient", random_scenario("nll", model, steps=2, rows=8), manager, tmp_path)
    assert outcome.beyond == [NORM]
    divergence = outcome.divergence
    assert (divergence.quantity, divergence.step, divergence.tensor) == (NORM, 1, "")
    assert divergence.measurement.got == pytest.approx(2 * divergence.measurement.expected, rel=1e-5)


def test_a_mixture_whose_experts_are_stored_together_is_compared(manager, tmp_path):
    tiny_model(KINDS["gpt_oss"]).save_pretrained(tmp_path / "model")
    cases.tokenizer().save_pretrained(tmp_path / "model")
    outcome = outcome_of("dtensor", random_scenario("nll", tmp_path / "model", steps=1, rows=4), manager, tmp_path)
    assert (outcome.verdict, outcome.reason) == ("agrees", "")


def test_a_backend_that_can_be_made_must_work(model, manager, tmp_path):
    """An error after the backend was built is a failure, also for backends that were not named."""
    scenario = random_scenario("nll", model, steps=1, rows=2)
    outcome = compare_with_oracle(scenario, Candidate("refuses"), manager=manager, folder=tmp_path, named=False)
    assert (outcome.verdict, outcome.reason, outcome.fails) == ("failed", "I like none of it", True)


def test_losses_near_nothing_are_compared_to_the_floor(model):
    scenario = Scenario("x", model, [], NLLLoss(), oracle_step_with(NLLLoss()), floor=1.0)
    assert loss_measured(scenario, 1, 3e-6, 1e-6).error == pytest.approx(2e-6)
    assert loss_measured(scenario, 1, 4.4, 4.0).error == pytest.approx(0.1)
    assert loss_measured(scenario, 1, math.nan, 1.0).error == math.inf
    assert [loss_measured(scenario, step, 1.0, 1.0).tolerance for step in (1, 2)] == [1e-5, 1e-4]


def test_of_several_steps_one_that_is_beyond_its_tolerance_is_told():
    first, later = Measurement(LOSS, 5e-5, 1e-5, 1.0, 1.0, "step 1"), Measurement(LOSS, 9e-5, 1e-4, 1.0, 1.0, "step 2")
    assert farthest([first, later]) is first
    assert farthest([replace(first, error=5e-6), later]) is later


def test_the_oracle_takes_the_step_of_a_loss_function_in_parts(model, monkeypatch):
    """A loss function applied to some rows at a time must give what the oracle's own formula gives on all rows."""
    batch = cases.batch(8)
    whole, parts = (new_oracle(model, 1e-4, 1.0, 1.0, {}) for _ in range(2))
    monkeypatch.setattr(
        oracle_policy, "ELEMENTS", 3 * cases.WIDTH * parts.model.config.vocab_size
    )  # three rows at a time
    expected = whole.step(batch, "nll")
    assert oracle_step_with(NLLLoss())(parts, batch) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-6)
    for name, weight in whole.weights().items():
        torch.testing.assert_close(parts.weights()[name], weight, rtol=1e-6, atol=1e-7)
    assert torch.allclose(oracle_outputs(parts, batch), parts.logprobs(batch), atol=1e-6)


def test_a_batch_without_valid_tokens_is_no_step(model):
    oracle = new_oracle(model, 1e-4, 1.0, 1.0, {})
    before = oracle.weights()
    batch = BatchedDataDict({**cases.batch(4), "sample_mask": torch.zeros(4)})
    assert oracle_step_with(NLLLoss())(oracle, batch) == (0.0, 0.0)
    assert all(torch.equal(weight, before[name]) for name, weight in oracle.weights().items())


def test_a_batch_without_valid_tokens_moves_nothing_on_either_side(model, manager, tmp_path):
    """The gradient that selects the compared elements is then that of the next batch."""
    empty = BatchedDataDict({**cases.batch(8), "sample_mask": torch.zeros(8)})
    scenario = Scenario("x", model, [empty, cases.batch(8)], NLLLoss(), oracle_step_with(NLLLoss()), floor=1.0)
    assert not scenario.answers.start.compared["model.embed_tokens.weight"].all()
    assert outcome_of("dtensor", scenario, manager, tmp_path).verdict == "agrees"
    nothing = Scenario("x", model, [empty], NLLLoss(), oracle_step_with(NLLLoss()), floor=1.0)
    assert outcome_of("dtensor", nothing, manager, tmp_path).verdict == "agrees"


def test_more_steps_and_a_larger_rate_leave_more_room(model):
    scenario = random_scenario("nll", model, steps=1, rows=2)
    assert scenario.slack == 1.0
    batches = list(scenario.batches) * 40
    assert Scenario("x", model, batches, scenario.loss, scenario.oracle_step, lr=3e-4).slack == pytest.approx(6.0)
