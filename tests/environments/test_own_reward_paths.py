"""How a user's own reward function is found: by an import path, or in the program itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from own_reward_runs import rewards

from rlframework.base.errors import ConfigError
from rlframework.config.environments import DatasetConfig
from rlframework.environments.dataset import DatasetEnvironment
from rlframework.plugins.configure import load_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder")]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", r"module 'own' \(.*own\.py\) has no 'score'"),
        ("def f():\n    raise KeyError('x')\nf()", r"import of 'own' raised KeyError: 'x' \(.*own\.py, line 2"),
        ("import sys\nsys.exit(3)", "raised SystemExit: 3"),
        ("score = 3", "is not callable, but int"),
        ("class score:\n    pass", "is a class; give a function or a callable object"),
        ("def score(text): ...", r"own\.py, line 1\) has the unsupported parameters \(text\)\. A reward function"),
        ("def score(completions, golds): ...", r"\(completions, golds\)\. Add \*\*columns, to get columns"),
        ("def score(prompt, completions): ...", r"has the unsupported parameters \(prompt, completions\)"),
        ("def score(completion, /): ...", r"has the unsupported parameters"),
        ("def score(completion, **rest): ...", r"has the unsupported parameters \(completion, \*\*rest\)"),
        ("def score(solution_str, method): ...", r"unsupported parameters .*verl's is `def compute_score"),
        ("def score(samples, completions, **rest): ...", r"unsupported parameters .*TRL's signature"),
    ],
)
def test_a_function_that_cannot_be_used_is_rejected(folder: Path, source: str, message: str, monkeypatch) -> None:
    (folder / "own.py").write_text(source)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    with pytest.raises(ConfigError, match=f"^environment.reward: .*{message}"):
        DatasetEnvironment(DatasetConfig(path="rows.jsonl", reward="own:score"), seed=0)
    sys.modules.pop("own", None)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("own", "'own' is not an import path: write module:name"),
        (
            "no_such_module_here:score",
            r"there is no module 'no_such_module_here' in the current directory \({0}\) or among",
        ),
    ],
)
def test_a_path_to_no_module_is_rejected(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.format(re.escape(str(Path.cwd())))):
        DatasetEnvironment(DatasetConfig(path="rows.jsonl", reward=path), seed=0)


PROGRAM = """
import own_rewards
from rlframework.config.environments import DatasetConfig
from rlframework.plugins.configure import load_config
from rlframework.environments.dataset import DatasetEnvironment

BONUS = [0.25]

class Judge:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, completion):
        return self.scale * len(completion)

judge = Judge(2.0)

def helper(completion):
    return len(completion) + BONUS[0]

def my_reward(completion):
    return helper(completion) + own_rewards.Scorer()(completion)

async def wait(completions):
    return [helper(completion) for completion in completions]

def run(reward, **keys):
    environment = DatasetEnvironment(DatasetConfig(path="rows.jsonl", reward=reward, **keys), seed=0)
    sample = environment.samples("train")[0]
    try:
        [outcome] = environment.step([sample], [[*sample.messages, {"role": "assistant", "content": "abc"}]])
        return outcome.reward
    finally:
        environment.shutdown()

for keys in ({}, {"reward_timeout": None}):
    print(run("__main__:my_reward", **keys), run(my_reward, **keys), run(wait, **keys), run("__main__:judge", **keys))
source = {"environment": {"name": "dataset", "path": "rows.jsonl", "reward": my_reward}, "algorithm": {"name": "grpo"},
          "policy": {"model_name": "m"}, "generation": {"max_new_tokens": 1}}
print(load_config(source).environment.reward)
"""


@pytest.mark.parametrize("kind", ["script", "notebook"])
def test_a_function_of_the_program_itself(folder: Path, kind: str) -> None:
    """A script without an `if __name__` guard, and a `__main__` without a file; in a process of its own and without."""
    (folder / "program.py").write_text(PROGRAM)
    command = ["program.py"] if kind == "script" else ["-c", PROGRAM]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["3.75 3.75 3.25 6.0"] * 2 + ["__main__:my_reward"], done.stderr


def test_a_function_of_the_program_that_cannot_be_sent_is_rejected(make, monkeypatch) -> None:
    lock = threading.Lock()

    def score(completion: str) -> float:
        with lock:
            return 0.5

    monkeypatch.setattr(sys.modules["__main__"], "score", score, raising=False)
    assert rewards(make("__main__:score", reward_timeout=None), ["x"]) == [0.5]
    with pytest.raises(ConfigError, match=r"defined in the program itself and uses values that cannot be sent.*lock"):
        make("__main__:score", reward_timeout=5.0)


def test_a_function_without_an_import_path_is_rejected() -> None:
    with pytest.raises(ValueError, match="has no import path; define it at the top level"):
        DatasetConfig(path="rows.jsonl", reward=lambda completion: 0.5)
    source = {"environment": {"name": "dataset", "path": "rows.jsonl", "reward": lambda completion: 0.5}}
    with pytest.raises(ConfigError, match=r"environment\.reward: .*has no import path"):
        load_config(source)


def test_a_function_that_was_defined_again_is_told_so(monkeypatch) -> None:
    """As in a notebook: the configuration of an earlier cell has the earlier function."""

    def reward_of_a_cell(completion: str) -> float:
        return 0.5

    reward_of_a_cell.__module__, reward_of_a_cell.__qualname__ = "__main__", "reward_of_a_cell"
    monkeypatch.setattr(sys.modules["__main__"], "reward_of_a_cell", lambda completion: 1.0, raising=False)
    with pytest.raises(ValueError, match="reward_of_a_cell was defined again since; run the cell or line that makes"):
        DatasetConfig(path="rows.jsonl", reward=reward_of_a_cell)


def test_check_and_reward_together_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"reward \(a:b\) and check \(exact\) both score completions"):
        DatasetConfig(path="rows.jsonl", reward="a:b", check="exact")


def test_training_rows_do_not_depend_on_how_answers_are_scored() -> None:
    config = DatasetConfig(path="rows.jsonl", validation_path="rows.jsonl", reward="a:b", failed_reward=1.0)
    judging = {"reward", "reward_timeout", "reward_concurrency", "max_reward_failures", "failed_reward", "check"}
    assert {f"environment.{key}" for key in judging} <= config.unseen_by_training
