"""A user's own reward function: how it is found and called, what it may return, and how failures are handled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlframework.config.environments import DatasetConfig
from rlframework.configure import load_config
from rlframework.environments import reward_calls
from rlframework.environments.dataset import DatasetEnvironment
from rlframework.errors import ConfigError, UserError
from rlframework.interfaces.environment import LARGEST_REWARD, StepOutcome

pytestmark = pytest.mark.slow
here_and_in_a_process = pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "process"])

REWARDS = """
import asyncio
import functools
import os
import re
import sys
import time

import numpy as np


def lengths(samples, completions):
    return [len(completion) for completion in completions]


def everything(completions, prompts, answers, samples):
    return list(map(one, prompts, completions, answers, samples))


def one(prompt, completion, answer, sample):
    return prompt == f"{answer}?" and completion == f"{answer}!" and sample.metadata["level"] == answer


def with_default(sample, completion, scale=2.0):
    return scale * len(completion)


class Scorer:
    def __call__(self, completion):
        return 0.5

    def method(self, completion):
        return 0.25


scorer = Scorer()
partial = functools.partial(with_default, scale=3.0)


async def single(completion, answer):
    await asyncio.sleep(0.05)
    return float(answer)


async def together(samples, completions):
    await asyncio.sleep(0)
    return np.arange(len(samples), dtype=np.float32)


def tensor(samples, completions):
    import torch

    return torch.arange(len(samples))


def generator(completions):
    yield from (1.0 for _ in completions)


def scalars(samples, completions):
    import torch

    return [np.float32(0.5), np.bool_(True), torch.tensor(2), torch.tensor([3.0])[0], np.array(4)][: len(samples)]


def too_few(samples, completions):
    return [1.0] * (len(samples) - 1)


def act(completion, answer):
    print("judging", answer, file=sys.stderr)
    if completion == "regex":
        re.match("(a+)+$", "a" * 40 + "b")
    if completion == "die":
        os._exit(3)
    if completion == "raise":
        raise ValueError(f"bad {answer}")
    if completion == "nan":
        return float("nan")
    if completion == "text":
        return "good"
    if completion == "none":
        return None
    if completion == "huge":
        return 10**400
    if completion == "exit":
        sys.exit(4)
    if completion == "dict":
        return {"accuracy": 1.0}
    return {"reward": 1.0, "length": len(completion)}


async def act_async(completion, answer):
    if completion == "sleep":
        await asyncio.sleep(60)
    if completion == "block":
        time.sleep(60)
    if completion == "raise":
        raise ValueError(f"bad {answer}")
    return 1.0


async def act_all(samples, completions):
    await asyncio.sleep(60 if "sleep" in completions else 0)
    return [1.0] * len(samples)


def forgot(completion):
    return single(completion, "1")


def trl(prompts, completions, level, **kwargs):
    assert set(kwargs) == {"answer"} and len(kwargs["answer"]) == len(prompts)
    assert prompts == [f"{n}?" for n in level]
    return [float(completion == n) for completion, n in zip(completions, level, strict=True)]


async def trl_async(completions, **kwargs):
    assert {"prompts", "level", "answer"} == set(kwargs)
    return [len(completion) for completion in completions]


def trl_messages(prompts, completions, **kwargs):
    assert all(turn["content"].endswith("?") for [turn] in prompts)
    return [float(completion[0]["content"] == "same") for completion in completions]


def process_id(completion):
    return os.getpid()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `own_rewards.py` and rows."""
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"{n}?", "answer": n, "level": str(n)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    return tmp_path


@pytest.fixture
def make():
    """`make(function, **keys)`: an environment with that function of `own_rewards`; shut down afterwards."""
    made = []

    def environment(function: str, **keys: Any) -> DatasetEnvironment:
        path = function if ":" in function else f"own_rewards:{function}"
        made.append(DatasetEnvironment(DatasetConfig(path="rows.jsonl", reward=path, **keys), seed=0))
        return made[-1]

    yield environment
    for environment_ in made:
        environment_.shutdown()


def scored(environment: DatasetEnvironment, completions: list[str]) -> list[StepOutcome]:
    samples = environment.samples("train")[: len(completions)]
    return environment.step(samples, [[{"role": "assistant", "content": text}] for text in completions])


def rewards(environment: DatasetEnvironment, completions: list[str]) -> list[float]:
    return [outcome.reward for outcome in scored(environment, completions)]


@here_and_in_a_process
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("lengths", [0, 1, 2]),
        ("with_default", [0, 2, 4]),
        ("partial", [0, 3, 6]),
        ("scorer", [0.5, 0.5, 0.5]),
        ("scorer.method", [0.25, 0.25, 0.25]),
        ("together", [0, 1, 2]),
        ("tensor", [0, 1, 2]),
        ("generator", [1, 1, 1]),
        ("scalars", [0.5, 1.0, 2.0]),
    ],
)
def test_accepted_functions(make, function: str, expected: list[float], timeout: float | None) -> None:
    environment = make(function, reward_timeout=timeout)
    for _ in range(2):
        assert rewards(environment, ["", "x", "xy"]) == expected
    assert environment.scores


@here_and_in_a_process
@pytest.mark.parametrize("function", ["everything", "one"])
def test_each_answer_comes_with_its_own_prompt_and_row(make, function: str, timeout: float | None) -> None:
    environment = make(function, reward_timeout=timeout)
    right = [f"{sample.answer}!" for sample in environment.samples("train")[:3]]
    assert rewards(environment, [*right, "no!"]) == [1, 1, 1, 0]


def test_async_calls_are_awaited_together_and_keep_their_order(make) -> None:
    """Forty of 0.05 s, eight at a time, take some 0.25 s, and one by one 2 s."""
    environment = make("single", reward_concurrency=8)
    samples = list(environment.samples("train"))
    rewards(environment, ["x"])  # the process is up
    began = time.monotonic()
    assert rewards(environment, ["x"] * len(samples)) == [float(sample.answer) for sample in samples]
    assert time.monotonic() - began < 1.5


@here_and_in_a_process
def test_failures_are_counted_printed_once_and_get_their_reward(make, caplog, timeout: float | None) -> None:
    environment = make("act", max_reward_failures=0.8, failed_reward=-1.0, reward_timeout=timeout)
    kinds = ["ok", "raise", "nan", "text", "none", "raise", "huge", "exit", "dict", "ok"]
    outcomes = scored(environment, kinds)
    assert [outcome.reward for outcome in outcomes] == [1.0 if kind == "ok" else -1.0 for kind in kinds]
    passed, failed = {"length": 2.0, "reward_failures": 0.0}, {"accuracy": 0.0, "reward_failures": 1.0}
    assert [outcome.metrics for outcome in outcomes] == [passed if kind == "ok" else failed for kind in kinds]
    printed = caplog.text
    assert printed.count("ValueError: bad") == 1
    assert printed.count("own_rewards:act") == 6  # nan and huge are both not finite
    assert "own_rewards.py" in printed
    assert "reward_calls.py" not in printed
    assert "it returned None, which is not a number: NoneType" in printed
    assert "reward is not finite" in printed
    assert "it returned a dict without 'reward': {'accuracy': 1.0}" in printed
    caplog.clear()
    scored(environment, kinds)
    assert not caplog.messages


def test_a_call_that_hangs_or_dies_is_one_failure_and_the_others_are_scored(make, caplog) -> None:
    environment = make("act", reward_timeout=1.0, max_reward_failures=0.5)
    assert rewards(environment, ["ok", "regex", "die", "ok", "ok"]) == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert "ended with exit code 3" in caplog.text
    assert "took more than environment.reward_timeout, which is 1 s" in caplog.text
    line = 1 + next(number for number, text in enumerate(REWARDS.splitlines()) if "re.match" in text)
    assert f'own_rewards.py", line {line} in act' in caplog.text


def test_async_calls_time_out_alone_but_one_that_blocks_takes_its_neighbours_with_it(make) -> None:
    environment = make("act_async", reward_timeout=0.5, max_reward_failures=0.9, reward_concurrency=2)
    assert rewards(environment, ["ok", "sleep", "raise", "ok", "ok"]) == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert rewards(environment, ["ok", "block", "sleep", "ok", "ok", "ok"]) == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def test_a_batched_function_that_times_out_fails_for_all(make) -> None:
    environment = make("act_all", reward_timeout=0.5, max_reward_failures=1.0)
    assert rewards(environment, ["ok", "sleep"]) == [0.0, 0.0]
    assert rewards(environment, ["ok", "ok"]) == [1.0, 1.0]


def test_too_many_failures_end_the_run_and_name_the_place(make, folder: Path) -> None:
    environment = make("act")
    assert rewards(environment, ["raise", *["ok"] * 9])[0] == 0.0  # a tenth is allowed
    with pytest.raises(UserError) as error:
        scored(environment, ["ok", "raise", "nan", *["ok"] * 7])
    line = 1 + REWARDS.splitlines().index("def act(completion, answer):")
    text = str(error.value)
    assert (
        f"environment.reward='own_rewards:act' ({folder / 'own_rewards.py'}, line {line}) failed for 2 of the" in text
    )
    assert "of 10 answers, which is more than environment.max_reward_failures=0.1 allows" in text
    assert "ValueError: bad" in text


@here_and_in_a_process
def test_a_wrong_number_of_values_is_an_error_at_once(make, timeout: float | None) -> None:
    environment = make("too_few", max_reward_failures=1.0, reward_timeout=timeout)
    with pytest.raises(UserError, match=r"own_rewards:too_few.* returned 2 values for 3 answers"):
        scored(environment, ["", "", ""])


def test_a_coroutine_that_is_never_awaited_is_reported(make, caplog) -> None:
    assert rewards(make("forgot", max_reward_failures=1.0, reward_timeout=None), ["x"]) == [0.0]
    assert "write `async def`" in caplog.text


def test_no_process_outlives_the_environment(make) -> None:
    environment = make("process_id")
    [pid] = rewards(environment, ["x"])
    assert pid != os.getpid()
    environment.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    assert rewards(make("process_id", reward_timeout=None), ["x"]) == [os.getpid()]


def test_no_process_outlives_a_killed_driver(folder: Path) -> None:
    """The driver gets SIGKILL while the function holds Python's lock."""
    (folder / "driver.py").write_text(
        "from rlframework.environments.own_reward import RewardProcess\n"
        "from rlframework.interfaces.environment import Sample\n"
        "process = RewardProcess('own_rewards:act', timeout=600.0, concurrency=1, is_async=False)\n"
        "sample = Sample('a', (), 'A')\n"
        "process.score([sample], ['ok'], lambda *_: None)\n"
        "print(process._process.pid, flush=True)\n"
        "process.score([sample], ['regex'], lambda numbers, results: print('started', flush=True))\n"
    )
    with subprocess.Popen([sys.executable, "driver.py"], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        assert driver.stdout.readline() == "started\n"
        driver.kill()
    until = time.monotonic() + 10
    while (
        Path(f"/proc/{pid}/stat").exists()
        and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    ):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("source", "path", "message"),
    [
        ("", "own", "'own' is not an import path: write module:name"),
        ("", "no_such_module_here:score", "there is no module 'no_such_module_here' in the current directory"),
        ("", "own:score", r"module 'own' \(.*own\.py\) has no 'score'"),
        (
            "def f():\n    raise KeyError('x')\nf()",
            "own:score",
            r"import of 'own' raised KeyError: 'x' \(.*own\.py, line 2",
        ),
        ("import sys\nsys.exit(3)", "own:score", "raised SystemExit: 3"),
        ("score = 3", "own:score", "is not callable, but int"),
        ("class score:\n    pass", "own:score", "is a class; give a function or a callable object"),
        (
            "def score(text): ...",
            "own:score",
            r"own\.py, line 1\) has the unsupported parameters \(text\)\. A reward function",
        ),
        ("def score(prompt, completions): ...", "own:score", r"has the unsupported parameters \(prompt, completions\)"),
        ("def score(completion, /): ...", "own:score", r"has the unsupported parameters"),
        ("def score(completion, **rest): ...", "own:score", r"has the unsupported parameters \(completion, \*\*rest\)"),
        ("def score(samples, completions, **rest): ...", "own:score", r"unsupported parameters .*TRL's signature"),
    ],
)
def test_paths_that_do_not_work_are_rejected(folder: Path, source: str, path: str, message: str, monkeypatch) -> None:
    (folder / "own.py").write_text(source)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    with pytest.raises(ConfigError, match=message) as error:
        DatasetEnvironment(DatasetConfig(path="rows.jsonl", reward=path), seed=0)
    assert str(error.value).startswith("environment.reward: ")
    sys.modules.pop("own", None)


def test_a_missing_module_is_reported_with_the_current_directory(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path, "/elsewhere"])
    with pytest.raises(ConfigError, match=re.escape(f"in the current directory ({Path.cwd()}) or among")):
        DatasetEnvironment(DatasetConfig(path="rows.jsonl", reward="no_such_module_here:score"), seed=0)


PROGRAM = """
import own_rewards
from rlframework.config.environments import DatasetConfig
from rlframework.configure import load_config
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
    with pytest.raises(ValueError, match="has no import path; define a function at the top level"):
        DatasetConfig(path="rows.jsonl", reward=lambda completion: 0.5)
    source = {"environment": {"name": "dataset", "path": "rows.jsonl", "reward": lambda completion: 0.5}}
    with pytest.raises(ConfigError, match=r"environment\.reward: .*has no import path"):
        load_config(source)


@here_and_in_a_process
def test_functions_of_trl(make, timeout: float | None) -> None:
    """They get prompts, completions and every other column of the rows as lists, by name."""
    assert rewards(make("trl", reward_timeout=timeout), ["0", "x", "2"]) == [1.0, 0.0, 1.0]
    assert rewards(make("trl_async", reward_timeout=timeout), ["x", "xy"]) == [1.0, 2.0]


def test_functions_of_trl_get_messages_where_the_prompt_is_messages(make, folder: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], "level": str(n)} for n in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert rewards(make("trl_messages", reward_timeout=None), ["same", "other"]) == [1.0, 0.0]


def test_check_and_reward_together_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"reward \(a:b\) and check \(exact\) both score completions"):
        DatasetConfig(path="rows.jsonl", reward="a:b", check="exact")


class Spiteful:
    """A value that raises on every access."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __repr__(self):
        raise RuntimeError("repr")


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.complex_numbers(),
    st.builds(Spiteful),
)


@given(st.one_of(VALUES, st.lists(VALUES), st.dictionaries(st.sampled_from(["reward", "accuracy", 3]), VALUES)))
def test_any_returned_value_is_a_result_of_finite_numbers_or_a_failure(value: Any) -> None:
    read = reward_calls.read_result(value)
    if isinstance(read, StepOutcome):
        given_ = value if isinstance(value, dict) else {"reward": value}
        expected = {name: float(number) for name, number in given_.items()}
        assert {**read.metrics, "reward": read.reward} == {**expected, "reward_failures": 0.0}
        assert all(abs(number) <= LARGEST_REWARD for number in (read.reward, *read.metrics.values()))
    else:
        assert read.text
        assert read.cause


def test_training_rows_do_not_depend_on_how_answers_are_scored() -> None:
    config = DatasetConfig(path="rows.jsonl", validation_path="rows.jsonl", reward="a:b", failed_reward=1.0)
    judging = {"reward", "reward_timeout", "reward_concurrency", "max_reward_failures", "failed_reward", "check"}
    assert {f"environment.{key}" for key in judging} <= config.unseen_by_training
