"""The core's environments conform, and the suite catches every mutant."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlframework.base.errors import DataError
from rlframework.environments.addition import AdditionEnvironment
from rlframework.plugins.manager import create_manager
from rlframework_conformance import EnvironmentSuite
from rlframework_conformance.layouts import Layout
from rlframework_conformance.measure import ConformanceFailure
from rlframework_conformance.mutants.proof import MutantProof

FIXTURES = Path(__file__).parents[3] / "tests" / "fixtures"
PATHS = {"train_path": str(FIXTURES / "gsm8k_train.jsonl"), "validation_path": str(FIXTURES / "gsm8k_test.jsonl")}


class TestAddition(EnvironmentSuite):
    backend = "addition"


class TestGsm8k(EnvironmentSuite):
    backend = "gsm8k"
    section = PATHS


class TestDataset(EnvironmentSuite):
    backend = "dataset"
    section = {"path": PATHS["train_path"], "check": "math"}  # noqa: RUF012


class TestUnscoredDataset(EnvironmentSuite):
    backend = "dataset"
    section = {"path": PATHS["train_path"], "validation_path": PATHS["validation_path"]}  # noqa: RUF012


class TestToolGame(EnvironmentSuite):
    backend = "probe_tool_game:ToolGame"
    pytestmark = pytest.mark.slow


class TestGymnasium(EnvironmentSuite):
    backend = "gymnasium"
    section = {"id": "FrozenLake-v1", "actions": ("left", "down", "right", "up"), "train_samples": 8}  # noqa: RUF012


class TestTools(EnvironmentSuite):
    backend = "tools"
    section = {"tools": "probe_calculator:Calculator", "path": PATHS["train_path"], "check": "math"}  # noqa: RUF012
    pytestmark = pytest.mark.slow


class TestReasoningGym(EnvironmentSuite):
    backend = "reasoning_gym"
    section = {"task": "basic_arithmetic", "train_samples": 20, "validation_samples": 4}  # noqa: RUF012
    pytestmark = pytest.mark.slow


class TestMutants(MutantProof):
    kind = "environment"
    backend = "gsm8k"
    section = PATHS


class TestEpisodeMutants(MutantProof):
    kind = "environment"
    backend = "probe_tool_game:ToolGame"
    pytestmark = pytest.mark.slow


class Tagged(AdditionEnvironment):
    """A correct reply needs tags, but no sample shows this."""

    def samples(self, split):
        return [replace(sample, completion="") for sample in super().samples(split)]

    def step(self, samples, conversations):
        found = [re.search("<answer>(.*)</answer>", turns[-1]["content"]) for turns in conversations]
        rewards = [float(one is not None and one[1] == sample.answer) for one, sample in zip(found, samples)]  # noqa: B905
        outcomes = super().step(samples, conversations)
        return [replace(outcome, reward=reward) for outcome, reward in zip(outcomes, rewards, strict=True)]


class Shown(Tagged):
    """Each sample's completion shows the tags."""

    def samples(self, split):
        return [replace(sample, completion=f"<answer>{sample.answer}</answer>") for sample in super().samples(split)]


class Unscored(AdditionEnvironment):
    scores = False

    def step(self, samples, conversations):
        raise DataError("there is no judge")


class Careless(Unscored):
    """Scores conversations of two turns."""

    def step(self, samples, conversations):
        if conversations and len(conversations[0]) > 3:
            return []
        return super().step(samples, conversations)


def failures_of(part, tmp_path):
    """Return the messages of the tests that fail, by name."""
    manager = create_manager()
    record = manager.select("environment", "addition").record
    own = type("Own", (EnvironmentSuite,), {"backend": "addition", "section": {"digits": 1}})
    harness = own.open_harness(
        record, Layout(), manager=manager, device="cpu", folder=tmp_path, models=tmp_path, target=part
    )
    found = {}
    for name in own.expected(record, Layout(), "cpu"):
        try:
            getattr(own(), name)(harness)
        except ConformanceFailure as failure:
            found[name] = str(failure)
    return found


@pytest.mark.slow
def test_a_right_reply_is_the_completion_or_the_answer_without_one(tmp_path):
    assert failures_of(Shown, tmp_path) == {}
    found = failures_of(Tagged, tmp_path)
    assert list(found) == ["test_a_right_answer_is_worth_more_than_a_wrong_one"]
    assert "the sample's answer (it has no completion) is a correct reply" in next(iter(found.values()))


@pytest.mark.slow
def test_without_scores_the_tests_of_judging_ask_for_refusals(tmp_path):
    assert failures_of(Unscored, tmp_path) == {}
    found = failures_of(Careless, tmp_path)
    assert set(found) == {
        "test_a_right_answer_is_worth_more_than_a_wrong_one",
        "test_a_batch_is_judged_as_its_rows_one_by_one",
        "test_the_last_turn_of_the_assistant_is_judged",
        "test_judging_changes_no_argument",
        "test_rewards_are_finite_whatever_the_model_writes",
    }
    assert all("step with second answers and `scores` False" in text for text in found.values())


@pytest.mark.parametrize("extra", [1, -1])
def test_each_odd_reply_has_an_outcome(extra, tmp_path):
    class Miscounting(AdditionEnvironment):
        def step(self, samples, conversations):
            outcomes = super().step(samples, conversations)
            odd = any("boxed" in turns[-1]["content"] for turns in conversations)
            return outcomes if not odd else outcomes + outcomes[:1] if extra > 0 else outcomes[:-1]

    assert list(failures_of(Miscounting, tmp_path)) == ["test_rewards_are_finite_whatever_the_model_writes"]
