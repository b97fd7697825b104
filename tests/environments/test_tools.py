"""Methods as tools: schemas, checked calls, and episodes of a user's class. Expected texts and schemas are by hand."""

import asyncio
import importlib
import sys
import threading
from dataclasses import dataclass
from typing import Literal

import pytest
from episode_play import calls, play, says, texts

from rlframework.base.errors import ConfigError, RLFrameworkError, UserError
from rlframework.config.environments import ToolsConfig
from rlframework.environments import threads
from rlframework.environments.tool_environment import ToolEnvironment
from rlframework.environments.tools import call, tools_of

CLASS = '''
import time

class Calculator:
    """Counts its calls."""

    def __init__(self, sample):
        self.calls, self.sample = 0, sample

    def add(self, a: int, b: int = 2) -> int:
        """Add two integers.

        Args:
            a: the first term,
                any integer
            b: the second term
        """
        self.calls += 1
        return a + b

    def divide(self, a: float, b: float) -> float:
        """Divide a by b."""
        return a / b

    async def slow(self) -> str:
        """Wait."""
        return "waited"

    def long(self) -> str:
        """Say much."""
        return "x" * 5000

    def close(self):
        closed.append(self.calls)

closed = []
made = []

def score(completion, answer):
    return float(completion == answer)

def broken(completion):
    raise ValueError("no reward")

class Failing:
    def draw(self) -> int:
        """Draw."""
        return 1

    def reward(self, completion):
        if completion == "raise":
            return 1 / 0
        return "text" if completion == "text" else 1

class Rewarded:
    def __init__(self, seed):
        self.seed, self.drawn = seed, 0

    def draw(self) -> list[int]:
        """Draw."""
        self.drawn += 1
        return [self.seed, self.drawn]

    def reward(self, completion):
        return {"reward": self.drawn * 0.5, "accuracy": completion == "done", "draws": self.drawn}
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The module `calculator_tools` in the current directory, and rows.jsonl."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "calculator_tools.py").write_text(CLASS)
    rows = "".join(f'{{"prompt": "{n}+2=", "answer": "{n + 2}"}}\n' for n in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    yield importlib.import_module("calculator_tools")
    del sys.modules["calculator_tools"]


@pytest.fixture
def make(module):
    """Make the environment with the given keys; it is shut down at the end."""
    made = []

    def make(**keys):
        config = ToolsConfig(**{"tools": "calculator_tools:Calculator", "path": "rows.jsonl", **keys})
        made.append(ToolEnvironment(config, seed=0))
        return made[-1]

    yield make
    for environment in made:
        environment.shutdown()


def one_call(holder, name, arguments):
    return asyncio.run(call(holder, calls((name, arguments))["tool_calls"][0]))


def test_the_schema_of_a_method(module):
    [add, *_] = [tool["function"] for tool in tools_of(module.Calculator)]
    assert (add["name"], add["description"]) == ("add", "Add two integers.")
    assert add["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "the first term, any integer"},
            "b": {"type": "integer", "description": "the second term", "default": 2},
        },
        "required": ["a"],
        "additionalProperties": False,
    }


@dataclass
class Point:
    x: int
    y: int = 0


class Typed:
    def copy(self, schema: list[Point], json: Literal["a", "b"], model: dict[str, float] | None = None) -> Point:
        """Take names and types that pydantic models do not like."""
        assert all(isinstance(point, Point) for point in schema)
        return schema[0]

    @staticmethod
    def static(self_less: bool) -> bool:
        """Turn round."""
        return not self_less

    @property
    def public(self) -> int:
        return 1

    def _private(self, x: int) -> int:
        """No tool."""
        return x


def test_arguments_of_other_types():
    assert [tool["function"]["name"] for tool in tools_of(Typed())] == ["copy", "static"]
    answer = one_call(Typed(), "copy", {"schema": [{"x": 3}], "json": "a"})
    assert answer == {"role": "tool", "tool_call_id": "call_0", "name": "copy", "content": '{"x":3,"y":0}'}
    assert one_call(Typed(), "static", {"self_less": True})["content"] == "false"
    assert one_call(Typed(), "_private", {"x": 1})["content"].startswith("error: there is no tool '_private'")


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("add", {"a": 40}, "42"),
        ("add", "", "error: wrong arguments of 'add': a: Field required"),
        ("divide", {"a": 1, "b": 4}, "0.25"),
        ("slow", {}, "waited"),
        ("slow", "", "waited"),
        ("add", {"a": "40"}, "error: wrong arguments of 'add': a: Input should be a valid integer"),
        ("add", {"a": True}, "error: wrong arguments of 'add': a: Input should be a valid integer"),
        ("add", {"a": 1.5}, "error: wrong arguments of 'add': a: Input should be a valid integer"),
        ("add", {"a": 1, "c": 2}, "error: wrong arguments of 'add': c: Extra inputs are not permitted"),
        ("add", {}, "error: wrong arguments of 'add': a: Field required"),
        ("add", "{a: 1}", "error: the arguments of 'add' are not valid JSON: "),
        ("add", "[1, 2]", "error: the arguments of 'add' are not a JSON object, but [1, 2]"),
        ("add", '{"a": NaN}', "error: the arguments of 'add' are not valid JSON: NaN is not a JSON number"),
        ("add", '{"a": ' + "[" * 100_000, "error: the arguments of 'add' are not valid JSON: "),
        ("add", '{"a": "\\ud800"}', "error: the arguments of 'add' cannot be read: "),
        ("add", " " * 1_000_001, "error: the arguments of 'add' have 1000001 characters; at most 1000000"),
        ("sub", {}, "error: there is no tool 'sub'; the tools are: add, divide, slow, long"),
        ("", "{", "error: there is no name of a tool in this call; the tools are: add, divide, slow, long"),
        ("divide", {"a": 1.0, "b": 0.0}, "error: ZeroDivisionError: float division by zero"),
        ("long", {}, "x" * 4000 + "\n[cut: the first 4000 of 5000 characters]"),
    ],
    ids=range(20),
)
def test_a_call_is_answered(make, name, arguments, said):
    environment = make(reward="calculator_tools:score")
    sample = environment.samples("train")[0]
    (answer,) = play(environment, sample, [calls((name, arguments))])[2][0].observations
    assert (answer["role"], answer["tool_call_id"], answer["name"]) == ("tool", "call_0", name)
    whole = said.endswith((": ", "float division by zero"))
    assert answer["content"].startswith(said) if whole else answer["content"] == said


@pytest.mark.slow
def test_an_episode(make, module):
    environment = make(reward="calculator_tools:score")
    sample = next(each for each in environment.samples("train") if each.answer == "7")
    turn = calls(("add", {"a": 5}), ("sub", {}), ("add", {"a": 1, "b": 1}))
    tools, first, outcomes = play(environment, sample, [turn, says("7")])
    assert [tool["function"]["name"] for tool in tools] == ["add", "divide", "slow", "long"]
    assert first == sample.messages
    assert [message["tool_call_id"] for message in outcomes[0].observations] == ["call_0", "call_1", "call_2"]
    assert [text[:6] for text in texts(outcomes[0])] == ["7", "error:", "2"]
    assert (outcomes[0].reward, outcomes[0].done) == (0.0, False)
    assert (outcomes[1].reward, outcomes[1].done) == (1.0, True)
    assert module.closed == [2]
    assert play(environment, sample, [says("8")])[2][0].reward == 0.0
    assert module.closed == [2, 0]  # the second episode has an object of its own


def test_calls_beyond_the_limit_are_refused(make, module):
    environment = make(reward="calculator_tools:score", max_calls_per_turn=2)
    outcome = play(environment, environment.samples("train")[0], [calls(*[("add", {"a": 1})] * 4)])[2][0]
    assert [text[:10] for text in texts(outcome)] == ["3", "3", "error: too", "error: too"]
    assert module.closed == [2]


def test_the_reward_of_the_class(make):
    environment = make(tools="calculator_tools:Rewarded")
    sample = environment.samples("train")[0]
    outcomes = play(environment, sample, [calls(("draw", {})), calls(("draw", {})), says("done")], seed=17)[2]
    assert texts(outcomes[1]) == ["[17,2]"]
    assert (outcomes[2].reward, dict(outcomes[2].metrics)) == (1.0, {"accuracy": 1.0, "draws": 2.0})


@pytest.mark.parametrize(
    ("completion", "problem"),
    [("raise", "raised ZeroDivisionError: division by zero"), ("text", "failed: it returned 'text', which is not a")],
)
def test_a_reward_of_the_class_that_fails_is_an_error_of_its_episode(make, caplog, completion, problem):
    """Not a `UserError`, which is a mistake in the configuration. The traceback of one that raises is logged once."""
    environment = make(tools="calculator_tools:Failing")
    sample = environment.samples("train")[0]
    for _ in range(2):
        with pytest.raises(
            RLFrameworkError, match=rf"reward of environment.tools='calculator_tools:Failing' {problem}"
        ) as raised:
            play(environment, sample, [says(completion)])
        assert not isinstance(raised.value, UserError)
    assert play(environment, sample, [says("1")])[2][0].reward == 1.0
    assert len([each for each in caplog.records if each.exc_info]) == int(completion == "raise")


@pytest.mark.slow
def test_a_reward_function_that_fails_costs_its_answer(make):
    environment = make(reward="calculator_tools:broken", failed_reward=-1.0, max_reward_failures=0.5)
    sample = environment.samples("train")[0]
    for _ in range(8):
        outcome = play(environment, sample, [says("1")])[2][0]
        assert (outcome.reward, outcome.metrics["reward_failures"]) == (-1.0, 1.0)
    for _ in range(2):  # and all later ones, so that the run ends although an error costs one episode
        with pytest.raises(UserError, match=r"failed for 9 of 9 answers.*max_reward_failures=0\.5"):
            play(environment, sample, [says("1")])
    environment.shutdown()  # a second time, by the fixture, does nothing


def no_docstring(self, a: int) -> int:
    return a


def no_annotation(self, a) -> int:
    """F."""


def star(self, *a: int) -> int:
    """F."""


def no_json(self, a: threading.Thread) -> int:
    """F."""


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        (no_docstring, r"Own\.f has no docstring"),
        (no_annotation, r"Own\.f: parameter 'a' has no annotation"),
        (star, r"Own\.f has the parameter \*a"),
        (no_json, r"Own\.f has an annotation that is not a JSON type"),
        (1, "Own has no tools"),
    ],
)
def test_a_class_that_cannot_be_described(method, problem):
    with pytest.raises(ConfigError, match=problem):
        tools_of(type("Own", (), {"f": method}))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({}, "set one of environment.reward.*none is set"),
        ({"tools": "calculator_tools:Rewarded", "check": "exact"}, "both are set"),
        ({"tools": "calculator_tools:score", "check": "exact"}, "is not a class"),
        ({"tools": "calculator_tools:Missing", "check": "exact"}, "has no 'Missing'"),
    ],
)
def test_a_wrong_configuration(make, keys, problem):
    with pytest.raises(ConfigError, match=problem):
        make(**keys)


def test_a_call_that_hangs_is_left_behind_and_exits_are_errors():
    release = threading.Event()

    async def cancelled():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await threads.call(release.wait)
        for error in (SystemExit(3), StopIteration(4)):
            with pytest.raises(RuntimeError, match=r"exit\(3\)|StopIteration: 4"):
                await threads.call(raising, error)

    def raising(error):
        raise error

    asyncio.run(cancelled())
    release.set()
