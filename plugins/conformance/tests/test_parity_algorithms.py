"""Parity of algorithms: their own batches and losses, with critics, teachers and heads, on every backend."""

from __future__ import annotations

import pytest
import torch

from rlframework.algorithms.losses import ClippedPGLoss
from rlframework_conformance import cases
from rlframework_conformance.parity.algorithm_scenario import algorithm_scenarios
from rlframework_conformance.parity.compare import compare_with_oracle
from rlframework_conformance.parity.outcome import LOGPROBS, NORM, Candidate

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory, model):
    reward = cases.model("reward", tmp_path_factory.mktemp("reward"))
    return {"language": model, "score": reward, "value": reward}


def scenarios_of(name, models, manager, *keys, steps=2):
    sizes = {"steps": steps, "rows": 4, "vocabulary": len(cases.tokenizer()), "backend": "dtensor"}
    return algorithm_scenarios(name, keys, models, manager=manager, **sizes)


def outcome_of(scenario, manager, folder, mutant=None):
    candidate = Candidate("dtensor", mutant=mutant)
    return compare_with_oracle(scenario, candidate, manager=manager, folder=folder, named=True)


@pytest.mark.parametrize(
    ("name", "compared"),
    [
        ("grpo", ["grpo"]),
        ("ppo", ["ppo", "ppo critic"]),
        ("reward_model", ["reward_model"]),
        ("process_reward_model", ["process_reward_model"]),
        ("distillation", ["distillation"]),
    ],
)
def test_a_sound_backend_takes_the_algorithms_steps(name, compared, models, manager, tmp_path):
    found = scenarios_of(name, models, manager)
    assert [scenario.name for scenario in found] == compared
    for scenario in found:
        assert [batch.size for batch in scenario.batches] == [4, 4]
        outcome = outcome_of(scenario, manager, tmp_path)
        assert (outcome.verdict, outcome.reason) == ("agrees", "")
        assert set(outcome.measurements) == set(outcome.checked)


@pytest.mark.parametrize(
    ("name", "mutant", "beyond"),
    [
        ("ppo", "trained_values_after_the_token", NORM),
        ("reward_model", "score_before_the_end", LOGPROBS),
        ("reward_model", "trained_scores_of_other_rows", NORM),
        ("distillation", "sets_of_the_position_before", NORM),
    ],
)
def test_what_is_wrong_with_a_head_is_noticed(name, mutant, beyond, models, manager, tmp_path):
    scenario = scenarios_of(name, models, manager, steps=1)[-1]
    outcome = outcome_of(scenario, manager, tmp_path, mutant)
    assert outcome.fails
    assert beyond in outcome.beyond


def test_a_language_model_gets_a_new_head(models, manager, tmp_path):
    """Which is 0, so that in the first step nothing but it has a gradient."""
    (scenario,) = scenarios_of("reward_model", {**models, "score": models["language"]}, manager)
    assert scenario.settings == {"head": "score", "head_init": "zeros"}
    assert torch.equal(scenario.answers.outputs[0], torch.zeros(4))
    assert outcome_of(scenario, manager, tmp_path).verdict == "agrees"


def test_the_teacher_is_another_model(models, manager):
    """Otherwise the loss of the first step and its gradient would be 0."""
    (scenario,) = scenarios_of("distillation", models, manager, steps=1)
    (loss, norm), *_ = scenario.answers.steps
    assert loss > 0.01
    assert norm > 0.01


def test_keys_of_the_section_are_those_of_the_steps(models, manager):
    (scenario,) = scenarios_of("distillation", models, manager, "tokens=sampled", steps=1)
    assert isinstance(scenario.loss, ClippedPGLoss)
    assert scenario.batches[0]["advantages"].any()
