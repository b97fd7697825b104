"""Episodes that fail cost themselves alone; what environments must not return ends the rollout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scripted_episodes import Counter, samples

from rlframework.base.errors import DataError, RLFrameworkError, UserError
from rlframework.environments.tool_episodes import ToolEpisode, ToolSession, refusal
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.environment import Episode, StepOutcome
from rlframework.rollout import episode_thread
from rlframework.rollout.step_rollouts import rollout


def failing(method: str, fail: Callable[[], Any], only: str = "s1") -> type[Counter]:
    """A `Counter` whose `method` awaits `fail()` first, in the second turn if it is `step`, for the sample `only`."""

    class Failing(Counter):
        async def _maybe(self, name: str) -> None:
            if name == method and self.sample.id == only and (name != "step" or self.turn == 1):
                outcome = fail()
                if asyncio.iscoroutine(outcome):
                    await outcome

        async def reset(self) -> Any:
            await self._maybe("reset")
            return await super().reset()

        async def step(self, message: Any) -> StepOutcome:
            await self._maybe("step")
            return await super().step(message)

        async def close(self) -> None:
            await super().close()
            await self._maybe("close")

    return Failing


def broken() -> None:
    raise RuntimeError("sandbox is gone")


async def stubborn() -> None:
    """Ignores its first cancellation."""
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        await asyncio.sleep(600)


async def forgiving() -> None:
    """Ends normally when it is cancelled."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(600)


async def waits_in_a_tool() -> None:
    class Slow(ToolSession):
        async def open(self) -> Any:
            return ()

        async def call(self, call: Any) -> Any:
            await asyncio.sleep(600)

    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    await ToolEpisode(samples(1)[0], Slow(), None, max_calls=1).step({"role": "assistant", "tool_calls": [call]})  # type: ignore[arg-type, typeddict-item]


def cancelled() -> None:
    raise asyncio.CancelledError


def leaves() -> None:
    sys.exit(3)


SHORT = "environment.step_timeout=0.2"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a short `step_timeout`, the loop of episodes counts as blocked after a minute without progress only."""
    beside = episode_thread.run_beside
    monkeypatch.setattr(
        episode_thread, "run_beside", lambda work, *, stalled_after, name: beside(work, stalled_after=60.0, name=name)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("method", "fail", "says", "length"),
    [
        ("reset", broken, "RuntimeError in reset: sandbox is gone", 1),
        ("step", broken, "RuntimeError in step, turn 2: sandbox is gone", 11),
        ("step", lambda: asyncio.sleep(600), r"step, turn 2 took more than environment.step_timeout=0.2 seconds", 11),
        ("step", stubborn, r"step, turn 2 took more than environment.step_timeout=0.2 seconds", 11),
        ("step", forgiving, r"step, turn 2 took more than environment.step_timeout=0.2 seconds", 11),
        ("step", waits_in_a_tool, r"step_timeout=0.2 seconds; it was in a call of the tool 'search'", 11),
        ("step", cancelled, r"step, turn 2 was cancelled by the environment", 11),
        ("step", leaves, r"step, turn 2: it called sys.exit(3)", 11),
    ],
)
def test_a_failing_episode_is_masked_out_counted_and_visible(
    make_parts: Any, method: str, fail: Any, says: str, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    parts = make_parts(failing(method, fail), None, SHORT)
    with caplog.at_level(logging.WARNING):
        result = rollout(parts, samples(3), torch.tensor([5, 6, 7]))
    assert result.failed.tolist() == [False, True, False]
    assert result.data["sample_mask"].tolist() == [1.0, 0.0, 1.0]
    assert int(result.data["input_lengths"][1]) == length
    assert result.rewards[1] == 0.0
    assert result.accuracies[1] == 0.0
    assert says in result.failures[1]
    assert result.failures[0] == ""
    assert result.metrics["failed_episodes"] == 1.0
    assert [episode.closed for episode in parts.environment.episodes] == [1, 1, 1]
    assert "1 of 3 episodes of environment 'digits' failed" in caplog.text
    (record,) = result.records(1, "train", 1, parts.tokenizer)
    assert says in record.failure
    assert (record.sample, record.prompt) == ("s1", "1+1=")
    assert record.model_input == ("" if method == "reset" else "1+1=")
    assert not any(turn["trained"] for turn in record.turns)

    alone = rollout(make_parts(Counter), samples(3), torch.tensor([5, 6, 7]))
    for key in ("input_ids", "token_mask", "generation_logprobs"):
        assert torch.equal(result.data[key][[0, 2]], alone.data[key][[0, 2]]), key
    assert result.metrics["reward"] == float(alone.rewards[[0, 2]].mean())
    assert result.metrics["completion_length"] == 4.0


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_a_step_that_takes_too_long_is_cancelled_before_its_episode_is_closed(make_parts: Any) -> None:
    seen: list[str] = []

    class Slow(Counter):
        async def step(self, message: Any) -> StepOutcome:
            if self.sample.id == "s0":
                return await super().step(message)
            try:
                await asyncio.sleep(600)
            finally:
                seen.append("cancelled")
            raise AssertionError

        async def close(self) -> None:
            if self.sample.id == "s1":
                seen.append("closed")

    rollout(make_parts(Slow, None, SHORT), samples(2), torch.arange(2))
    assert seen == ["cancelled", "closed"]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("fail", [broken, lambda: asyncio.sleep(600)])
def test_an_episode_that_cannot_be_closed_still_counts(make_parts: Any, fail: Any, caplog: Any) -> None:
    result = rollout(make_parts(failing("close", fail), None, SHORT), samples(2), torch.arange(2))
    assert not result.failed.any()
    assert "an episode of sample 's1' was not closed" in caplog.text


@pytest.mark.parametrize(("allowed", "failing"), [(0.5, 3), (1.0, 4)])
def test_more_failed_episodes_than_allowed_are_an_error(make_parts: Any, allowed: float, failing: int) -> None:
    class Broken(Counter):
        async def step(self, message: Any) -> StepOutcome:
            if int(self.sample.id[1:]) < failing:
                raise KeyError(self.sample.id)
            return await super().step(message)

    limit = f"environment.max_failed_episodes={allowed}"
    failed = r"3 of 4 .*, which is more than environment\.max_failed_episodes=0\.5 allows; the first.*'s0': KeyError"
    all_failed = r"(?s)all 4 episodes of environment 'digits' failed.*'s0': Key.*\n *raise KeyError\(self"
    with pytest.raises(UserError, match=failed if allowed < 1.0 else all_failed):
        rollout(make_parts(Broken, None, limit), samples(4), torch.arange(4))
    failing -= 1
    result = rollout(make_parts(Broken, None, limit), samples(4), torch.arange(4))
    assert result.metrics["failed_fraction"] == failing / 4


def test_an_error_of_the_engine_ends_the_rollout_and_closes_the_episodes(make_parts: Any) -> None:
    parts = make_parts(Counter)

    def answer(request: Any) -> list[int]:
        raise RLFrameworkError("the engine is broken")

    parts.engine.answer = answer
    with pytest.raises(RLFrameworkError, match="the engine is broken"):
        rollout(parts, samples(3), torch.arange(3))
    assert [episode.closed for episode in parts.environment.episodes] == [1, 1, 1]
    assert parts.generation.client.gather is None


@pytest.mark.slow
def test_an_environment_that_blocks_the_loop_is_named_with_the_line(
    make_parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlframework.rollout.episode_thread._CLOSING", 0.1)
    waiting: queue.Queue[None] = queue.Queue()

    class Blocking(Counter):
        async def step(self, message: Any) -> StepOutcome:
            waiting.get(timeout=300)  # waits in a module of the standard library, which is not what to look at
            return StepOutcome(0.0)

    parts = make_parts(Blocking, None, "environment.step_timeout=1")
    with pytest.raises(UserError, match=r"'digits' blocks .* loop .*test_failing_episodes.py:\d+ in step"):
        rollout(parts, samples(1), torch.arange(1))
    waiting.put(None)


def interrupted() -> None:
    raise KeyboardInterrupt("enough")


class RaisesAtOnce(Counter):
    """Its `step` is no coroutine."""

    def step(self, message: Any) -> Any:
        if self.sample.id == "s1":
            raise ValueError("no move")
        return super().step(message)


def unmade(sample: Any, seed: int) -> Episode:
    if sample.id == "s1":
        raise OSError("no more sandboxes")
    return Counter(sample, seed)


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        (
            failing("step", interrupted),
            "RuntimeError in step, turn 2: it raised KeyboardInterrupt, .* Exception: enough",
        ),
        (RaisesAtOnce, r"ValueError in step, turn 1: no move \(.*test_failing_episodes.py:\d+\)$"),
        (unmade, r"OSError in episode: no more sandboxes \("),
    ],
    ids=["no Exception, which would end the loop", "no coroutine", "cannot be made"],
)
def test_an_error_costs_its_episode_alone(make_parts: Any, kind: Any, failure: str) -> None:
    result = rollout(make_parts(kind), samples(2), torch.arange(2))
    assert result.failures[0] == ""
    assert re.match(failure, result.failures[1])
    assert result.data["sample_mask"].tolist() == [1.0, 0.0]


# -- what environments return wrongly ends the rollout: test_outcomes has each mistake ---------------------------------

ROBOT = {"role": "robot", "content": "1"}


class WrongReset(Counter):
    async def reset(self) -> Any:
        return [ROBOT] if self.sample.id == "s1" else await super().reset()


class WrongStep(Counter):
    async def step(self, message: Any) -> StepOutcome:
        outcome = await super().step(message)
        return replace(outcome, observations=[ROBOT]) if outcome.done and self.sample.id == "s1" else outcome


class WrongTools(Counter):
    tools = ({"name": "add"},)


class NoCoroutine(Counter):
    def step(self, message: Any) -> Any:
        return StepOutcome(1.0)


class Foreign(Counter):
    """Has a letter in its first message, and in the next, that the tokenizer lacks."""

    async def reset(self) -> Any:
        return [{"role": "user", "content": "1+ℵ=" if self.sample.id == "s0" else "1+1="}]

    async def step(self, message: Any) -> StepOutcome:
        return StepOutcome(0.0, False, ({"role": "user", "content": "ℵ"},))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (WrongReset, "for sample 's1' in reset a message with role='robot'"),
        (WrongStep, "for sample 's1' in turn 2 a message with role='robot'"),
        (WrongTools, "in reset the tool .*with a name of its own"),
        (NoCoroutine, "define it with `async def step`"),
    ],
)
def test_a_mistake_of_an_environment_ends_the_rollout(make_parts: Any, kind: Any, says: str) -> None:
    parts = make_parts(kind)
    with pytest.raises(UserError, match=f"environment 'digits' .*{says}"):
        rollout(parts, samples(3), torch.arange(3))
    assert {episode.closed for episode in parts.environment.episodes} == {1}


@pytest.mark.parametrize(("first", "where"), [(0, "'s0' in reset"), (1, "'s1' in turn 1")])
def test_text_without_tokens_names_sample_and_turn(make_parts: Any, first: int, where: str) -> None:
    says = rf"environment '\w+' returned for sample {where} messages that .*no token for \['ℵ'\]"
    with pytest.raises(DataError, match=says):
        rollout(make_parts(Foreign), samples(2)[first:], torch.arange(2 - first))


# -- turns that a chat template takes in another form or not at all ---------------------------------------------------

CALL = '<tool_call>{{"name": "add", "arguments": {}}}</tool_call>'
TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}{{ '[' + m.role + ']' + m.content }}"
    "{% if 'taboo' in m.content %}{{ raise_exception('a word that is taboo') }}{% endif %}"
    "{% if m.role == 'assistant' and m.content == 'odd' %}{{ raise_exception('an odd turn') }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% if 'taboo' in call.function.arguments.items() | string %}"
    "{{ raise_exception('a call that is taboo') }}{% endif %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': dict(call.function.arguments.items())} | tojson }}</tool_call>"
    "{% endfor %}{{ eos_token if m.role == 'assistant' }}{% endfor %}{{ '[assistant]' if add_generation_prompt }}"
)
"""As Qwen3.5's, this iterates over the arguments of a call; it rejects some turns."""


class Adder(Counter):
    """Answers each call, or a turn without one, with `observed`; ends after the second turn."""

    tools = ({"type": "function", "function": {"name": "add", "description": "", "parameters": {}}},)
    observed = "more"

    async def step(self, message: Any) -> StepOutcome:
        self.turn += 1
        results = tuple(
            {"role": "tool", "content": self.observed, "tool_call_id": call["id"]}
            for call in message.get("tool_calls", ())
        )
        observations = results or ({"role": "user", "content": self.observed},)
        return StepOutcome(1.0, True) if self.turn == 2 else StepOutcome(0.0, False, observations)


def play(make_parts: Any, turn: str, kind: Any = Adder, template: str = TEMPLATE) -> Any:
    """Play three episodes; the model writes `turn` first in that of `s1`, and `2` in all others."""
    parts = make_parts(kind, None, "generation.max_new_tokens=20000")
    parts.generation._limits = replace(parts.generation._limits, positions=None)
    client = parts.generation.client
    client._contract = replace(client._contract, vocabulary=None)  # the tokenizer below has more tokens than the model
    parts.tokenizer = character_tokenizer("".join(map(chr, range(32, 127))))
    parts.tokenizer.chat_template = template

    def answer(request: Any) -> list[int]:
        asked = parts.tokenizer.decode(request.prompt_ids)
        text = turn if asked.endswith("[user]1+1=[assistant]") else "2"
        return [*parts.tokenizer(text, add_special_tokens=False)["input_ids"], parts.tokenizer.eos_token_id]

    parts.engine.answer = answer
    return rollout(parts, samples(3), torch.arange(3))


class Refusing(Adder):
    async def step(self, message: Any) -> StepOutcome:
        outcome = await super().step(message)
        results = tuple(refusal(call, "no such row") for call in message.get("tool_calls", ()))
        return replace(outcome, observations=results or outcome.observations)


def test_calls_and_refusals_are_counted(make_parts: Any) -> None:
    result = play(make_parts, CALL.format("{}"), Refusing)
    counted = [result.metrics[name] for name in ("tool_calls", "malformed_tool_calls", "tool_errors")]
    assert counted == pytest.approx([1 / 3, 0.0, 1 / 3])


@pytest.mark.parametrize("arguments", ['"x"', "[1]", "null", '{"a": "\\ud83d"}', "5}{"])
def test_a_call_that_the_template_takes_in_another_form_goes_on(make_parts: Any, arguments: str) -> None:
    result = play(make_parts, CALL.format(arguments))
    assert not result.failed.any()
    assert result.rewards.tolist() == [1.0, 1.0, 1.0]
    assert result.metrics["episode_turns"] == 2.0
    assert result.metrics["tool_calls"] == pytest.approx(1 / 3)
    assert (result.metrics["malformed_tool_calls"] > 0) == (not arguments.startswith("{"))


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        (CALL.format('"taboo"'), "a call that is taboo. If it"),
        (CALL.format('"taboo"'), "; its last tool call is {'name': 'add', 'arguments': 'taboo'}"),
        pytest.param(CALL.format('{"a": ' * 900 + "1" + "}" * 900), "its last tool call is", id="nested too deeply"),
        ("odd", "; its last turn is 'odd'"),
    ],
)
def test_a_turn_that_the_template_does_not_take_fails_its_episode(make_parts: Any, turn: str, says: str) -> None:
    result = play(make_parts, turn)
    assert result.failed.tolist() == [False, True, False]
    assert result.failures[1].startswith("what the model wrote up to turn 1 cannot be rendered: ")
    assert says in result.failures[1]
    assert result.metrics["failed_episodes"] == 1.0


def test_half_a_character_that_a_tool_repeats_fails_its_episode(make_parts: Any) -> None:
    class Echo(Adder):
        async def step(self, message: Any) -> StepOutcome:
            for call in message.get("tool_calls", ()):
                self.observed = json.loads(call["function"]["arguments"])["a"]
            return await super().step(message)

    result = play(make_parts, CALL.format('{"a": "\\ud83d"}'), Echo)
    assert result.failed.tolist() == [False, True, False]
    assert "has a lone surrogate" in result.failures[1]


@pytest.mark.parametrize(("turn", "sample"), [("2", "s0"), (CALL.format("{}"), "s1"), (CALL.format('"x"'), "s1")])
def test_messages_of_the_environment_that_the_template_does_not_take_end_the_rollout(
    make_parts: Any, turn: str, sample: str
) -> None:
    class Taboo(Adder):
        async def step(self, message: Any) -> StepOutcome:
            self.observed = "taboo" if self.sample.id == sample else "more"
            return await super().step(message)

    with pytest.raises(
        DataError, match=rf"environment '\w+' returned for sample '{sample}' in turn 1 messages that cannot be"
    ):
        play(make_parts, turn, Taboo)
