"""A judge as a reward, against a local HTTP server whose replies and faults are given. Rewards are by hand."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from judge_server import PROMPT, Answer, Server, completion, failure, serving
from pydantic import ValidationError

from rlframework.base.errors import ConfigError, PluginError, UserError
from rlframework.config.endpoint import JudgeConfig
from rlframework.config.environments import DatasetConfig
from rlframework.environments.dataset import DatasetEnvironment

KEY = "very-private-0123456789"


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}=", "answer": "{n}"}}\n' for n in range(20)))
    made = []

    def make(server: Server, *, folder: Path | None = None, weight: float = 1.0, others: Any = None, **keys: Any):
        limits = {name: keys.pop(name) for name in ("max_reward_failures", "failed_reward") if name in keys}
        judge = {"base_url": server.url, "model": "m", "prompt": PROMPT, "scale": [0, 10], **keys}
        reward = {**(others or {}), "quality": {"judge": judge, "weight": weight}}
        made.append(DatasetEnvironment(DatasetConfig(path="rows.jsonl", reward=reward, **limits), seed=0))
        made[-1].start(folder)
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def score(environment: DatasetEnvironment, *answers: str):
    samples = [environment.samples("train")[0]] * len(answers)
    turns = [
        [*sample.messages, {"role": "assistant", "content": text}]
        for sample, text in zip(samples, answers, strict=True)
    ]
    return environment.step(samples, turns)


def by_completion(replies: dict[str, Answer]) -> Callable[[str, int], Answer]:
    def reply(prompt: str, attempt: int) -> Answer:
        return replies[prompt.partition("Completion: ")[2].partition(" Reference:")[0]]

    return reply


def rewards(outcomes) -> list[float]:
    return [outcome.reward for outcome in outcomes]


@pytest.mark.slow
def test_the_request_and_the_reward(environment, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    replies = {"a{b}": completion("The score 3 is too low.\n**Score:** 7.5/10"), "c": completion("SCORE = 2")}
    with serving(by_completion(replies)) as server:
        made = environment(server, weight=0.5, api_key_env="JUDGE_KEY", parameters={"max_tokens": 9, "seed": 3})
        outcomes = score(made, "a{b}", "c")
        sample = made.samples("train")[0]
    assert rewards(outcomes) == [0.5 * 0.75, 0.5 * 0.2]
    assert [dict(each.metrics) for each in outcomes] == [
        {"quality": value, "accuracy": 0.0, "reward_failures": 0.0} for value in (0.75, 0.2)
    ]
    prompt, body, headers = next(each for each in server.requests if "a{b}" in each[0])
    assert prompt == f"Question: {sample.messages[-1]['content']} Completion: a{{b}} Reference: {sample.answer}"
    assert body == {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 9, "seed": 3}
    assert headers["authorization"] == f"Bearer {KEY}"


def test_a_scale_where_less_is_better(environment):
    with serving(lambda *_: completion("score: 2")) as server:
        assert rewards(score(environment(server, scale=[5, 1]), "x")) == [0.75]


@pytest.mark.slow
def test_equal_completions_are_scored_once_and_requests_are_limited(environment):
    together = threading.Barrier(3, timeout=60.0)

    def in_threes(prompt: str, attempt: int) -> Answer:
        together.wait()
        return completion("Score: 5")

    with serving(in_threes) as server:
        made = environment(server, concurrency=3)
        answers = [str(number % 9) for number in range(18)]
        assert rewards(score(made, *answers)) == [0.5] * 18
        assert len(server.asked()) == 9
        assert rewards(score(made, *answers[:4])) == [0.5] * 4
    assert len(server.asked()) == 9
    assert server.most == 3


@pytest.mark.slow
def test_a_resumed_run_has_the_same_rewards_without_requests(environment, tmp_path):
    replies = {"a": completion("Score: 5"), "b": completion("none"), "c": completion("\u2028Score: \u00fc 1")}
    with serving(by_completion(replies)) as server:
        made = environment(server, folder=tmp_path, failed_reward=-2.0, max_reward_failures=1.0)
        first = score(made, "a", "b", "c")
        made.shutdown()
        file = tmp_path / "judge" / "quality.jsonl"
        assert [json.loads(line)["reply"] for line in file.read_bytes().splitlines()].count("Score: 5") == 1
        file.write_bytes(file.read_bytes() + b'{"key": "cut')
        again = environment(server, folder=tmp_path, failed_reward=-2.0, max_reward_failures=1.0)
        assert rewards(score(again, "a", "b", "c")) == rewards(first) == [0.5, -2.0, -2.0]
        assert len(server.asked()) == 3
        replies["d"] = completion("Score: 1")
        score(again, "d")
        again.shutdown()
        last = environment(server, folder=tmp_path)
        assert rewards(score(last, "d")) == [0.1]
        assert len(server.asked()) == 4
        other = environment(server, folder=tmp_path, parameters={"temperature": 1.0})
        score(other, "a")
    assert len(server.asked()) == 5


@pytest.mark.slow
def test_too_many_requests_wait_as_long_as_the_server_says(environment):
    def reply(prompt: str, attempt: int) -> Answer:
        return failure(429, Retry_After="1.2") if attempt == 0 else completion("Score: 10")

    with serving(reply) as server:
        made = environment(server)
        started = time.monotonic()
        assert rewards(score(made, "x")) == [1.0]
        assert time.monotonic() - started >= 1.2  # the first wait without the header is at most 0.5 s
    assert len(server.asked()) == 2


@pytest.mark.slow
def test_errors_of_the_server_are_retried_with_growing_waits(environment):
    times = []

    def reply(prompt: str, attempt: int) -> Answer:
        times.append(time.monotonic())
        return failure(500 + attempt) if attempt < 2 else completion("Score: 10")

    with serving(reply) as server:
        assert rewards(score(environment(server), "x")) == [1.0]
    first, second = times[1] - times[0], times[2] - times[1]
    assert first >= 0.375  # 0.5 s and then 1 s, less a random quarter
    assert second >= 0.75


@pytest.mark.parametrize(
    ("answer", "keys", "text", "requests"),
    [
        (failure(500, "broken"), {"max_retries": 1}, "HTTP status 500.*broken", 2),
        (failure(400, "too long"), {}, "HTTP status 400.*too long", 1),
        (completion("seven"), {}, "no score was found by .*pattern=.* in the reply 'seven'", 1),
        (completion("Score: 11"), {}, "the score '11' is not a number from 0 to 10", 1),
        (completion("Score: x"), {"pattern": "Score: (.*)"}, "the score 'x' is not a number from 0 to 10", 1),
        (completion(None), {}, "the reply has no text", 1),
        ((200, {}, b'{"choices": []}'), {}, "is not a chat completion", 1),
        ((200, {}, b"{"), {}, "JSONDecodeError", 1),
        ((200, {}, b'{"choices": ' + b"[" * 900 + b"]" * 900 + b"}"), {}, "is not a chat completion", 1),
        ((200, {}, b"[" * 50_000 + b"]" * 50_000), {}, "RecursionError", 1),
        ((200, {"Content_Type": "text/html"}, b"<p>hello</p>"), {}, "is not a chat completion: <p>hello", 1),
    ],
)
def test_a_failure_costs_its_completion_alone(environment, caplog, answer, keys, text, requests):
    replies = {"good": completion("Score: 4"), "bad": answer}
    with serving(by_completion(replies)) as server:
        made = environment(server, failed_reward=-1.0, max_reward_failures=0.5, **keys)
        good, bad = score(made, "good", "bad")
    assert (good.reward, good.metrics["reward_failures"]) == (0.4, 0.0)
    assert (bad.reward, bad.metrics["reward_failures"], bad.metrics["accuracy"]) == (-1.0, 1.0, 0.0)
    (warning,) = [record.getMessage() for record in caplog.records if "failed for sample" in record.getMessage()]
    assert "environment.reward.quality.judge (m at http://127.0.0.1:" in warning
    assert re.search(text, warning), warning
    assert len([prompt for prompt in server.asked() if "bad" in prompt]) == requests


def test_too_many_failures_end_the_run(environment):
    with serving(lambda *_: completion("none")) as server:
        made = environment(server, concurrency=1)
        with pytest.raises(UserError, match=r"(?s)max_reward_failures=0\.1 allows.*no score was found"):
            score(made, *"abcdefgh")
    assert len(server.asked()) < 8  # requests end with the run


@pytest.mark.slow
def test_a_reply_that_does_not_come_is_asked_for_again_until_the_deadline(environment):
    again = threading.Event()

    def late(prompt: str, attempt: int) -> Answer:
        if attempt == 0:
            assert again.wait(60)
            return completion("Score: 1")
        again.set()
        return completion("Score: 9")

    with serving(late) as server:
        made = environment(server, timeout=2.0)
        assert rewards(score(made, "x")) == [0.9]
    assert again.is_set()


@pytest.mark.slow
def test_the_deadline_covers_retries_and_waits(environment, caplog):
    with serving(lambda *_: failure(503, Retry_After="60")) as server:
        made = environment(server, deadline=3.0, max_reward_failures=1.0)
        (outcome,) = score(made, "x")
    assert outcome.metrics["reward_failures"] == 1.0
    assert "no reply within environment.reward.quality.judge.deadline, which is 3 s" in caplog.text


# -- before the run ---------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_one_error_before_the_run_that_does_not_show_it(environment, monkeypatch, caplog):
    monkeypatch.setenv("MINE", KEY)  # no name of a secret, so it is hidden by its value alone
    with serving(lambda *_: completion("Score: 1")) as server:
        server.trial = failure(401, f"{KEY} is not known")
        with pytest.raises(ConfigError) as found:
            environment(server, api_key_env="MINE")
    assert len(server.requests) == 1  # not retried
    text = str(found.value)
    assert text.startswith("environment.reward.quality.judge: the first request failed: m at http://127.0.0.1:")
    assert "the environment variable MINE" in text
    assert "*** is not known" in text
    assert KEY not in text + caplog.text


def test_a_missing_key_is_an_error_before_any_request(environment, monkeypatch):
    monkeypatch.delenv("MINE", raising=False)
    missing = pytest.raises(ConfigError, match=r"judge\.api_key_env: the environment variable MINE is not set")
    with serving(lambda *_: completion("Score: 1")) as server, missing:
        environment(server, api_key_env="MINE")
    assert server.requests == []


def test_only_the_named_key_is_sent(environment, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(lambda *_: completion("Score: 1")) as server:
        environment(server)
    assert KEY not in str(server.requests)


@pytest.mark.slow
def test_a_server_that_is_not_there_is_an_error(environment):
    server = Server(lambda *_: completion(""), url="http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9.*APIConnectionError.*base_url right"):
        environment(server)


def test_a_first_reply_without_a_score_is_a_warning(environment, caplog):
    with serving(lambda *_: completion("Score: 1")) as server:
        server.trial = completion("fine")
        environment(server)
    assert "in the first reply, to a trial completion" in caplog.text


def test_a_key_that_the_judge_repeats_is_not_written(environment, monkeypatch, tmp_path):
    monkeypatch.setenv("MINE", KEY)
    with serving(lambda *_: completion(f"{KEY} Score: 10")) as server:
        assert rewards(score(environment(server, api_key_env="MINE", folder=tmp_path), "x")) == [1.0]
    assert KEY not in (tmp_path / "judge" / "quality.jsonl").read_text()


# -- configuration ----------------------------------------------------------------------------------------------------

VALID: dict[str, Any] = {"base_url": "http://x/v1", "model": "m", "prompt": "{completion}", "scale": [0, 1]}


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"prompt": "{question}"}, "must contain {completion}"),
        ({"prompt": "{completion} {rubric}"}, "prompt has {rubric}; its fields are {question}, {completion}"),
        ({"prompt": "{completion!r} {completion}"}, "prompt has {completion}"),
        ({"prompt": "{completion} {"}, "write {{ for a literal brace"),
        ({"pattern": "score"}, "has 0 groups; it must have one"),
        ({"pattern": "("}, "is not a regular expression"),
        ({"scale": [3, 3]}, "two different scores"),
        ({"base_url": "x/v1"}, "base_url"),
        ({"api_key_env": "sk-1"}, "api_key_env"),
        ({"parameters": {"stream": True}}, "parameters has stream"),
    ],
)
def test_wrong_keys(keys, text):
    with pytest.raises(ValidationError) as found:
        JudgeConfig(**(VALID | keys))
    assert text in str(found.value)


@pytest.mark.parametrize("part", [{"judge": VALID, "function": "a:b"}, {"weight": 1.0}])
def test_a_reward_is_a_function_or_a_judge(part):
    with pytest.raises(ValidationError, match="set one of function"):
        DatasetConfig(path="x", reward={"quality": part})


def test_without_the_distribution_the_error_says_how_to_install_it(environment, monkeypatch):
    monkeypatch.setenv("RLFRAMEWORK_DISABLE_PLUGINS", "rlframework-serve")
    message = r"^environment\.reward\.quality\.judge needs a plugin with the hook rlframework_judge: .*plugins/serve"
    with pytest.raises(PluginError, match=message):
        environment(SimpleNamespace(url="http://127.0.0.1:9/v1"))


def test_the_configuration_of_the_page():
    page = Path(__file__).parents[3] / "docs" / "judge.md"
    block = re.search(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    config = DatasetConfig(**yaml.safe_load(block[1])["environment"])
    judge = config.reward["clear"].judge
    assert judge is not None
    assert "Question: 1=" in judge.prompt.format(question="1=", completion="", answer="")


@pytest.mark.slow
def test_a_judge_next_to_a_function(environment, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    code = 'def right(completion):\n    return {"reward": len(completion), "accuracy": 1.0}\n'
    (tmp_path / "beside_a_judge.py").write_text(code)
    right = {"correct": {"function": "beside_a_judge:right", "weight": 2.0}}
    with serving(lambda *_: completion("Score: 5")) as server:
        (outcome,) = score(environment(server, weight=0.25, others=right), "abc")
    assert outcome.reward == 2.0 * 3 + 0.25 * 0.5
    assert dict(outcome.metrics) == {"correct": 3.0, "quality": 0.5, "accuracy": 1.0, "reward_failures": 0.0}
