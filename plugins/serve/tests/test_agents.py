"""Rollouts by agents, with a scripted engine and with GRPO."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_agents import CALLED
from scripted_episodes import END, ScriptedEngine, samples

from rlframework.base.errors import EngineFault
from rlframework.config.sections import RunConfig
from rlframework.generation.driver import Generation
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.generation import GenerationResult
from rlframework.observers.timeline import Timeline
from rlframework.rollout.step_rollouts import rollout
from rlframework_serve.bodies import ApiError
from rlframework_serve.sessions import Session, Sessions

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+4=", "answer": str(n)}) + "\n" for n in range(12)))
    return path


@pytest.fixture
def agent_parts(run_config: Any, tmp_path: Path):
    def make(agent: str, *overrides: str, answer: Any = None) -> Any:
        from types import SimpleNamespace

        from rlframework.huggingface.tokenizer import load_tokenizer
        from rlframework_serve.agent_environment import AgentEnvironment

        keys = ["~environment", f"environment={{name: agent, agent: 'probe_agents:{agent}', path: {rows(tmp_path)}}}"]
        config: RunConfig = run_config("grpo", "generation.max_new_tokens=8", *keys, *overrides)
        tokenizer = load_tokenizer(config.policy.model_name)
        policy: Any = SimpleNamespace(config=config)
        generation = Generation(policy, tokenizer, [ScriptedEngine(answer or (lambda request: [5, 6, END]))])
        generation.finish_generation = lambda: True  # type: ignore[method-assign]
        environment = AgentEnvironment(config.environment, seed=0)  # type: ignore[arg-type]
        return SimpleNamespace(
            config=config, tokenizer=tokenizer, generation=generation, environment=environment, models={}, images=None
        )

    return make


@pytest.mark.slow
def test_the_rewards_of_agents(agent_parts: Any) -> None:
    result = rollout(agent_parts("digits"), samples(3), torch.arange(3))
    assert result.data["token_mask"].sum(1).tolist() == [3, 3, 3]
    assert result.rewards.tolist() == [1.0] * 3
    result = rollout(agent_parts("posts"), samples(2), torch.arange(2))
    assert (result.rewards.tolist(), result.metrics["reward/depth"]) == ([0.25] * 2, 2.0)
    assert rollout(agent_parts("posts_and_returns"), samples(2), torch.arange(2)).rewards.tolist() == [0.75] * 2
    text = agent_parts("digits").tokenizer.decode([5, 6])
    parts = agent_parts("leaves_it", "environment.check=exact")
    found = [*samples(1), samples(1)[0].__class__("x", samples(1)[0].messages, text)]
    assert rollout(parts, found, torch.arange(2)).rewards.tolist() == [0.0, 1.0]


def test_an_attempt_that_changes_its_sample_changes_no_other(agent_parts: Any) -> None:
    task = Sample("s", ({"role": "user", "content": "3"},), "3", metadata={"attempts": []})
    result = rollout(agent_parts("changes_its_sample"), [task] * 3, torch.arange(3))
    assert result.rewards.tolist() == [11.0] * 3
    assert [turns[0]["content"] for turns in result.transcripts] == ["3+"] * 3
    assert (task.messages[0]["content"], task.metadata) == ("3", {"attempts": []})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of the answer that the agent does not read
def test_an_agent_is_not_blamed_for_the_engine(agent_parts: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The answer 410 that it gets is no failure of its own: the fault of the engine ends the rollout."""

    class NoSpans(ScriptedEngine):
        def _result(self, request: Any) -> GenerationResult:
            return replace(super()._result(request), spans=())

    parts = agent_parts("digits")
    parts.generation.client.engines[0].__class__ = NoSpans
    with pytest.raises(EngineFault, match=r"(?s)scripted \('transformers'\).*its spans are empty"):
        rollout(parts, samples(1), torch.arange(1))
    gc.collect()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of the agent's own leak
def test_open_clients_are_closed_in_their_own_loop(agent_parts: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Their finalizers close connections by a task in the loop that runs, which fails in any loop but their own."""
    assert rollout(agent_parts("leaves_its_client_open"), samples(2), torch.arange(2)).rewards.tolist() == [1.0, 1.0]

    async def collect() -> None:
        gc.collect()
        await asyncio.sleep(0.1)

    asyncio.run(collect())
    gc.collect()
    assert "Event loop is closed" not in caplog.text


@pytest.mark.slow
def test_failing_agents_cost_themselves_alone(agent_parts: Any) -> None:
    result = rollout(agent_parts("sometimes", "environment.agent_timeout=6"), samples(4), torch.arange(4))
    assert result.failed.tolist() == [True, True, True, False]
    assert result.rewards.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert "RuntimeError in the agent: no sandbox" in result.failures[0]
    assert "environment.agent_timeout=6" in result.failures[1]
    assert "without a call of the endpoint" in result.failures[2]
    assert result.data["sample_mask"].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_attempts_without_a_reward_cost_themselves_alone(agent_parts: Any, caplog: pytest.LogCaptureFixture) -> None:
    result = rollout(agent_parts("mixed"), samples(4), torch.arange(4))
    raised, nothing, nan, fine = result.failures
    assert re.fullmatch(r"KeyError in the agent: 'missing' \(.*probe_agents.py:\d+\)", raised)
    assert "returned None and posted no reward" in nothing
    assert "return a float" in nothing
    assert "reward=nan for sample 's2'" in nan
    assert fine == ""
    assert result.rewards.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert all(f"sample '{name}': " in caplog.text for name in ("s0", "s1", "s2"))


def test_an_agent_that_stops_costs_itself_alone(agent_parts: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It would end the event loop of all, with a traceback of each task that it had."""
    result = rollout(agent_parts("stops"), samples(2), torch.arange(2))
    says = "RuntimeError in the agent: it raised KeyboardInterrupt, which is no Exception: enough ("
    assert result.failures[0].startswith(says)
    assert result.rewards.tolist() == [0.0, 1.0]
    assert "Traceback" not in caplog.text


def test_an_agent_that_raises_at_a_budget_is_truncated(agent_parts: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As episodes are, with the reward that it has by then."""
    result = rollout(agent_parts("endless", "environment.max_turns=2"), samples(3), torch.arange(3))
    assert result.failures == [""] * 3
    assert result.rewards.tolist() == [0.0, 0.5, 2.0]
    assert result.truncated.tolist() == [True] * 3
    assert result.metrics["truncated/max_turns"] == 1.0
    assert result.metrics["episode_turns"] == 2.0
    assert caplog.text.count("counts as truncated") == 1
    assert "this request for 1 exceeds environment.max_turns=2. Others" in caplog.text
    assert result.records(1, "train", 1)[0].truncated
    turns = [(turn["role"], turn.get("row")) for turn in result.transcripts[0]]
    assert turns == [("user", None), ("assistant", None), ("assistant", 2)]  # the same question again: another row


def test_an_attempt_counts_at_the_limit_that_ended_it(agent_parts: Any) -> None:
    """Each turn is cut at its tokens, and none is sampled after `max_turns`."""
    parts = agent_parts("endless", "environment.max_turns=2", answer=lambda request: [5] * 20)
    metrics = rollout(parts, samples(3), torch.arange(3)).metrics
    assert (metrics["truncated/max_turns"], metrics["truncated/max_new_tokens"]) == (1.0, 0.0)


def test_the_time_of_an_agents_own_code_is_what_lies_between_its_requests() -> None:
    """Two requests at the same time, of 0.1 and 0.2 seconds, and one later: three spans, of 0.05 seconds each."""

    async def attempt() -> None:
        session.begin_own_time()
        await asyncio.sleep(0.05)
        await asyncio.gather(*(session.run(asyncio.sleep(seconds)) for seconds in (0.1, 0.2)))
        await asyncio.sleep(0.05)
        await session.run(asyncio.sleep(0.1))
        await asyncio.sleep(0.05)
        session.end_own_time()

    session = Session("engine", timeline=(timeline := Timeline()))
    asyncio.run(attempt())
    spans = timeline.pop()
    assert {(span.lane, span.activity) for span in spans} == {("environment", "agent")}
    assert len(spans) == 3
    assert all(span.end - span.start >= 0.045 for span in spans)
    gaps = [after.start - before.end for before, after in pairwise(spans)]
    assert gaps[0] >= 0.19
    assert gaps[1] >= 0.09


@pytest.mark.slow
def test_the_timeline_has_the_agents_own_time(agent_parts: Any) -> None:
    parts = agent_parts("digits")
    parts.generation.client.timeline = timeline = Timeline()
    rollout(parts, samples(3), torch.arange(3))
    found = [span for span in timeline.pop() if (span.lane, span.activity) == ("environment", "agent")]
    assert len(found) >= 2 * 3  # before and after the request of each


def test_an_attempt_that_was_given_up_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframework_serve.sessions.MOST_GIVEN_UP", 1)
    sessions = Sessions()
    oldest, given_up, ended = (sessions.open(Session("engine")) for _ in range(3))
    sessions.close(oldest, given_up=True)
    sessions.close(given_up, given_up=True)
    sessions.close(given_up)
    sessions.close(ended)
    for session, status in ((oldest, 401), (given_up, 410), (ended, 401)):
        with pytest.raises(ApiError) as caught:
            sessions.find(f"Bearer {session.token}")
        assert caught.value.status == status
    assert [session.closed and session.closed.status for session in (given_up, ended)] == [410, 401]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A tiny Llama over all printable characters, which agents' prompts need."""
    tokenizer = character_tokenizer(ALPHABET)
    return str(make_llama(tmp_path / "llama", tokenizer, hidden=32, layers=2, heads=4, kv_heads=2))


@pytest.mark.slow
def test_an_agent_by_openai_agents_calls_its_tool(agent_parts: Any, model: str) -> None:
    tokenizer: Any = character_tokenizer(ALPHABET)

    def answer(request: Any) -> list[int]:
        second = "7" in tokenizer.decode(request.prompt_ids)[-20:]
        text = "7" if second else '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    CALLED.clear()
    keys = [f"policy.model_name={model}", "generation.max_new_tokens=100"]
    result = rollout(agent_parts("with_tool", *keys, answer=answer), samples(2), torch.arange(2))
    assert CALLED == [(3, 4)] * 2
    assert result.rewards.tolist() == [2.0, 2.0]  # the tool was called, and the answer is a digit
    assert (result.metrics["tool_calls"], result.metrics["malformed_tool_calls"]) == (1.0, 0.0)
    assert (result.metrics["episode_turns"], result.metrics["episode_rows"]) == (2.0, 1.0)
    assert [turn["role"] for turn in result.transcripts[0]] == ["user", "assistant", "tool", "assistant"]
    (record,) = result.records(1, "validation", 1, tokenizer)
    assert "Add two numbers." in record.model_input
    assert [(turn["trained"], turn.get("sampled")) for turn in record.turns] == [
        (False, sampled) for sampled in (None, True, None, True)
    ]
