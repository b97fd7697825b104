"""Several reward functions with weights. Sums are by hand."""

import json
import sys

import pytest
from pydantic import ValidationError

from rlframework.base.errors import ConfigError
from rlframework.config.environments import DatasetConfig
from rlframework.environments.dataset import DatasetEnvironment

MODULE = """
def right(completion, answer):
    return {"reward": float(completion == answer), "accuracy": completion == answer, "length": len(completion)}

def short(completion):
    if completion == "fail":
        raise ValueError("no")
    return -float(len(completion))

def is_right(completion, answer):
    return float(completion.strip() == answer)

def is_short(completion):
    return float(len(completion) < 5)

def only_right(completions, level, **kwargs):
    return [1.0 if level_ == text else None for level_, text in zip(level, completions)]

def only_fail(completions, answers):
    return [0.5 if text == "fail" else None for text in completions]

def asks(completions, levl, completion_ids, optional=1, **kwargs):
    return [0.0 for _ in completions]

def typo(completions, levl, **kwargs):
    return [0.0 for _ in completions]
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "two_rewards.py").write_text(MODULE)
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "{n}=", "answer": "{n}", "level": "{n}"}}\n' for n in range(20))
    )
    made = []

    def make(reward, **keys):
        made.append(DatasetEnvironment(DatasetConfig(**{"path": "rows.jsonl", "reward": reward} | keys), seed=0))
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_failing_part_fails_its_answer_alone(environment):
    failed, good = score(environment(TWO, failed_reward=-3.0, max_reward_failures=0.5), "fail", "x")
    assert (failed.reward, failed.metrics["reward_failures"], failed.metrics["accuracy"]) == (-3.0, 1.0, 0.0)
    assert (good.reward, good.metrics["reward_failures"]) == (-0.25, 0.0)


SOME = {
    "right": {"function": "two_rewards:only_right", "weight": 2.0},
    "failed": {"function": "two_rewards:only_fail"},
}


def test_a_function_that_returns_none_is_left_out_of_the_sum_and_none_of_all_is_a_failure(environment, caplog):
    made = environment(SOME, failed_reward=-3.0, max_reward_failures=0.5)
    first, second, neither = score(made, made.samples("train")[0].answer, "fail", "x")
    assert (first.reward, dict(first.metrics)) == (2.0, {"right": 1.0, "accuracy": 1.0, "reward_failures": 0.0})
    assert (second.reward, dict(second.metrics)) == (0.5, {"failed": 0.5, "accuracy": 0.0, "reward_failures": 0.0})
    assert (neither.reward, neither.metrics["reward_failures"]) == (-3.0, 1.0)
    assert caplog.text.count("every function returned None for an answer") == 1


@pytest.mark.parametrize(
    ("weights", "accuracies"),
    [({"right": 1.0, "short": 1.0}, [1.0, 0.0, 0.0, 0.0]), ({"right": 1.0, "short": 0.5}, [1.0, 1.0, 0.0, 0.0])],
)
def test_without_an_accuracy_the_rewards_with_the_largest_weight_decide(environment, weights, accuracies):
    made = environment(
        {name: {"function": f"two_rewards:is_{name}", "weight": weight} for name, weight in weights.items()}
    )
    answer = made.samples("train")[0].answer
    outcomes = score(made, answer, answer + " " * 20, "x", "x" * 20)
    assert [outcome.metrics["accuracy"] for outcome in outcomes] == accuracies


@pytest.mark.parametrize(
    ("function", "ending"),
    [
        ("typo", r"no row of rows.jsonl has; .* are 'answer', 'level'\. Did you mean 'level' for 'levl'\?"),
        ("asks", r"asks for 'levl', 'completion_ids', .* 'completion_ids': an argument of TRL that rlframework does"),
    ],
)
def test_columns_that_the_rows_lack_are_found_before_anything_is_scored(environment, function, ending):
    reward = {"one": {"function": f"two_rewards:{function}"}}
    with pytest.raises(ConfigError, match=rf"^environment\.reward\.one\.function='two_rewards:{function}' .*{ending}"):
        environment(reward)


def test_a_column_that_a_batch_lacks_is_none_and_validation_rows_need_it_too(environment, tmp_path):
    rows = [{"prompt": "a", "answer": "a", "level": "x"}, *({"prompt": str(n), "answer": "b"} for n in range(3))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = environment(SOME, max_reward_failures=1.0)
    sample = next(each for each in made.samples("train") if "level" not in each.metadata)
    [outcome] = made.step([sample], [[{"role": "assistant", "content": "fail"}]])
    assert outcome.reward == 0.5
    (tmp_path / "held.jsonl").write_text(json.dumps(rows[-1]) + "\n")
    with pytest.raises(ConfigError, match=r"asks for 'level', which no row of held\.jsonl has; .* are 'answer'"):
        environment(SOME, validation_path="held.jsonl")


ANSWERS = "def of_answers(completions, answers):\n    return [0.0 for _ in completions]\n"


@pytest.mark.parametrize(
    ("function", "column", "count"), [("only_right", "level", 2), ("asks", "optional", 1), ("of_answers", "answer", 1)]
)
def test_rows_without_a_value_that_a_function_asks_for_are_counted_once(
    environment, tmp_path, caplog, function, column, count
):
    """In lines 3 and, of `level`, 4; the column `more`, which nothing asks for, may be empty."""
    row = {"answer": "a", "level": "x", "levl": "", "completion_ids": 1, "more": None, "optional": 1}
    rows = [{"prompt": str(number)} | row for number in range(8)]
    rows[2] |= {"level": None, "answer": None, "optional": None}
    del rows[3]["level"]
    (tmp_path / "two_rewards.py").write_text(MODULE + ANSWERS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = environment({"one": {"function": f"two_rewards:{function}"}})
    assert not caplog.text
    made.samples("validation")
    assert not caplog.text
    made.samples("train")
    made.samples("train")
    [record] = caplog.records
    told = f"{count} of the 8 rows that were read of rows.jsonl have no value in the column '{column}', which"
    assert record.getMessage().startswith(told)
    assert "the first is rows.jsonl, line 3." in record.getMessage()


def test_the_key_of_a_function_that_cannot_be_used_is_named(environment):
    with pytest.raises(ConfigError, match=r"environment\.reward\.brief\.function: 'two_rewards:missing'"):
        environment(TWO | {"brief": {"function": "two_rewards:missing"}})


@pytest.mark.parametrize("reward", [{}, {"accuracy": {"function": "a:b"}}, {"a b": {"function": "a:b"}}, {"a": {}}])
def test_wrong_sections(reward):
    with pytest.raises(ValidationError, match="reward"):
        DatasetConfig(path="x", reward=reward)


@pytest.mark.parametrize(("weight", "kept"), [(1.0, "right"), (0.5, "right"), (1.0, "wrong")])
def test_a_penalty_that_keeps_accuracy_at_0_is_named_once(environment, caplog, weight, kept):
    """Not one that does not decide, and not where nothing was right."""
    penalty = {"function": "two_rewards:short", "weight": weight}
    made = environment({"correct": {"function": "two_rewards:is_right"}, "brief": penalty}, reward_timeout=None)
    answers = [made.samples("train")[0].answer if kept == "right" else kept] * 15
    outcomes = score(made, *answers, "")
    score(made, *answers, "")
    assert [outcome.metrics["accuracy"] for outcome in outcomes] == [float(weight == 0.5)] * 15 + [0.0]
    warnings = [record.getMessage() for record in caplog.records if "accuracy" in record.getMessage()]
    assert len(warnings) == (weight == 1.0 and kept == "right")
    for told in ("brief was at most 0 in 16 answers", "set environment.reward.brief.weight lower", "with correct"):
        assert all(told in warning for warning in warnings)
