"""Several reward functions with weights. Sums are by hand."""

import importlib
import sys

import pytest
from pydantic import ValidationError

from rlframework.config.environments import DatasetConfig
from rlframework.environments.dataset import DatasetEnvironment
from rlframework.errors import ConfigError

MODULE = """
def right(completion, answer):
    return {"reward": float(completion == answer), "accuracy": completion == answer, "length": len(completion)}

def short(completion):
    if completion == "fail":
        raise ValueError("no")
    return -float(len(completion))
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "two_rewards.py").write_text(MODULE)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}=", "answer": "{n}"}}\n' for n in range(20)))
    made = []

    def make(reward, **keys):
        made.append(DatasetEnvironment(DatasetConfig(path="rows.jsonl", reward=reward, **keys), seed=0))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()
    sys.modules.pop("two_rewards", None)


TWO = {
    "correct": {"function": "two_rewards:right", "weight": 2.0},
    "brief": {"function": "two_rewards:short", "weight": 0.25},
}


def score(environment, *answers):
    samples = [environment.samples("train")[0]] * len(answers)
    conversations = [
        [*sample.messages, {"role": "assistant", "content": text}]
        for sample, text in zip(samples, answers, strict=True)
    ]
    return environment.step(samples, conversations)


def test_the_weighted_sum_and_its_parts(environment):
    made = environment(TWO)
    answer = made.samples("train")[0].answer
    right, wrong = score(made, answer, "wrong")
    size = len(answer)
    assert right.reward == 2.0 * 1.0 + 0.25 * -size
    assert dict(right.metrics) == {
        "correct": 1.0, "brief": -size, "accuracy": 1.0, "correct_length": size, "reward_failures": 0.0,
    }  # fmt: skip
    assert wrong.reward == 2.0 * 0.0 + 0.25 * -5
    assert (wrong.metrics["correct"], wrong.metrics["brief"], wrong.metrics["accuracy"]) == (0.0, -5.0, 0.0)


def test_a_failing_part_fails_its_answer_alone(environment):
    failed, good = score(environment(TWO, failed_reward=-3.0, max_reward_failures=0.5), "fail", "x")
    assert (failed.reward, failed.metrics["reward_failures"], failed.metrics["accuracy"]) == (-3.0, 1.0, 0.0)
    assert (good.reward, good.metrics["reward_failures"]) == (-0.25, 0.0)


def test_the_key_of_a_function_that_cannot_be_used_is_named(environment):
    with pytest.raises(ConfigError, match=r"environment\.reward\.brief\.function: 'two_rewards:missing'"):
        environment(TWO | {"brief": {"function": "two_rewards:missing"}})


@pytest.mark.parametrize("reward", [{}, {"accuracy": {"function": "a:b"}}, {"a b": {"function": "a:b"}}, {"a": {}}])
def test_wrong_sections(reward):
    with pytest.raises(ValidationError, match="reward"):
        DatasetConfig(path="x", reward=reward)


def test_functions_become_import_paths(environment):
    environment(TWO)
    right = importlib.import_module("two_rewards").right
    config = DatasetConfig(path="x", reward={"correct": {"function": right}})
    assert config.reward_functions == {"environment.reward.correct.function": "two_rewards:right"}
    assert config.reward["correct"].weight == 1.0
