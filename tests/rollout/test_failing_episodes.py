"""Episodes that fail cost themselves alone; environments that return what they must not end the rollout."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted_episodes import Counter, samples

from rlframework.base.errors import DataError, RLFrameworkError, UserError
from rlframework.environments.tool_episodes import ToolEpisode, ToolSession
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
        ("reset", lambda: asyncio.sleep(600), r"reset took more than environment.step_timeout=0.2 seconds", 1),
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


def test_a_step_that_is_no_coroutine_and_raises(make_parts: Any) -> None:
    class Plain(Counter):
        def step(self, message: Any) -> Any:
            if self.sample.id == "s0":
                raise ValueError("no move")
            return super().step(message)

    result = rollout(make_parts(Plain), samples(2), torch.arange(2))
    assert re.fullmatch(r"ValueError in step, turn 1: no move \(.*test_failing_episodes.py:\d+\)", result.failures[0])
    assert result.failures[1] == ""


@pytest.mark.parametrize("kind", [BaseException, KeyboardInterrupt])
def test_what_is_no_exception_costs_its_episode_alone(make_parts: Any, kind: type[BaseException]) -> None:
    """It would end the event loop of all. Ctrl-C is not raised here, but in the main thread."""

    class Stops(Counter):
        async def step(self, message: Any) -> StepOutcome:
            if self.sample.id == "s0":
                raise kind("enough")
            return await super().step(message)

    result = rollout(make_parts(Stops), samples(2), torch.arange(2))
    says = f"RuntimeError in step, turn 1: it raised {kind.__name__}, which is no Exception: enough"
    assert result.failures[0].startswith(says)
    assert result.failures[1] == ""


def test_an_episode_that_cannot_be_made(make_parts: Any) -> None:
    def make(sample: Any, seed: int) -> Episode:
        if sample.id == "s0":
            raise OSError("no more sandboxes")
        return Counter(sample, seed)

    result = rollout(make_parts(make), samples(2), torch.arange(2))
    assert result.failures[0].startswith("OSError in episode: no more sandboxes (")
    assert result.failures[1] == ""
    assert result.data["input_ids"][0, :1].tolist() == [0]
    assert result.data["token_mask"][0].sum() == 0


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("fail", [broken, lambda: asyncio.sleep(600)])
def test_an_episode_that_cannot_be_closed_still_counts(make_parts: Any, fail: Any, caplog: Any) -> None:
    result = rollout(make_parts(failing("close", fail), None, SHORT), samples(2), torch.arange(2))
    assert not result.failed.any()
    assert "an episode of sample 's1' was not closed" in caplog.text


def test_no_episode_that_succeeds_is_an_error(make_parts: Any) -> None:
    class Broken(Counter):
        async def step(self, message: Any) -> StepOutcome:
            raise KeyError("answer")

    failed = r"(?s)all 2 episodes of environment 'digits' failed.*'s0': Key.*\n *raise KeyError\(\"answer\"\)"
    with pytest.raises(UserError, match=failed):
        rollout(make_parts(Broken), samples(2), torch.arange(2))


@pytest.mark.parametrize(("allowed", "failing"), [(0.5, 3), (1.0, 4)])
def test_more_failed_episodes_than_allowed_are_an_error(make_parts: Any, allowed: float, failing: int) -> None:
    class Broken(Counter):
        async def step(self, message: Any) -> StepOutcome:
            if int(self.sample.id[1:]) < failing:
                raise KeyError(self.sample.id)
            return await super().step(message)

    limit = f"environment.max_failed_episodes={allowed}"
    failed = r"3 of 4 .*, which is more than environment\.max_failed_episodes=0\.5 allows; the first.*'s0': KeyError"
    with pytest.raises(UserError, match=failed if allowed < 1.0 else r"all 4 episodes .*'s0': KeyError"):
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
    block = threading.Lock()

    class Blocking(Counter):
        async def step(self, message: Any) -> StepOutcome:
            block.acquire(timeout=300)
            return StepOutcome(0.0)

    parts = make_parts(Blocking, None, "environment.step_timeout=1")
    with block, pytest.raises(UserError, match=r"'digits' blocks .* loop .*test_failing_episodes.py:\d+ in step"):
        rollout(parts, samples(1), torch.arange(1))


USER = {"role": "user", "content": "1"}
WRONG_MESSAGES = [
    ("not a list", "'not a list' of type str; it must be a sequence of messages"),
    (["text"], "'text' of type str as a message"),
    ([{"role": "user", "content": None}], "with the content None of type NoneType"),
    ([{"role": "user", "content": [{"type": "image"}]}], "with the content {'type': 'image'}"),
    ([{"role": "robot", "content": "1"}], "a message with role='robot'; it must be one of system, user"),
    ([{"content": "1"}], "a message with role=None"),
    ([{**USER, "colour": "red"}], "a message with colour; the keys are content, name"),
    ([{"role": "tool", "content": "1", "tool_call_id": "x"}], "tool_call_id='x'; calls without an answer: none"),
    (
        [{"role": "tool", "content": "1"}],
        "none. A tool that the model calls in plain text, not in `tool_calls`, answers with role 'user'",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("messages", "says"), WRONG_MESSAGES)
def test_wrong_messages_name_environment_sample_and_turn(make_parts: Any, messages: Any, says: str) -> None:
    class WrongReset(Counter):
        async def reset(self) -> Any:
            return messages if self.sample.id == "s1" else [USER]

    class WrongStep(Counter):
        async def step(self, message: Any) -> Any:
            wrong = self.sample.id == "s1" and self.turn == 1
            self.turn += 1
            return StepOutcome(0.0, False, messages if wrong else (USER,))

    for kind, turn in ((WrongReset, "reset"), (WrongStep, "turn 2")):
        parts = make_parts(kind)
        with pytest.raises(UserError) as caught:
            rollout(parts, samples(3), torch.arange(3))
        assert str(caught.value).startswith(f"environment 'digits' returned for sample 's1' in {turn} ")
        assert says in str(caught.value)
        assert {episode.closed for episode in parts.environment.episodes} == {1}


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (None, "None of type NoneType; step must return a StepOutcome"),
        ((1.0, True), "of type tuple; step must return a StepOutcome"),
        (StepOutcome(float("nan")), "reward=nan for sample 's0' in turn 1"),
        (StepOutcome(1.0, metrics={"steps": "two"}), "steps='two' for sample 's0' in turn 1"),
        (StepOutcome(1.0, done="no"), "done='no'"),  # type: ignore[arg-type]
        (StepOutcome(1.0, metrics=[1]), "metrics=[1]"),  # type: ignore[arg-type]
        (StepOutcome(1.0, done=False), "no observations, although the episode is not done"),
        (StepOutcome(1.0, False, ({"role": "assistant", "content": "1"},)), "role='assistant'"),
    ],
)
def test_wrong_outcomes(make_parts: Any, outcome: Any, says: str) -> None:
    class Wrong(Counter):
        async def step(self, message: Any) -> Any:
            return outcome

    with pytest.raises(UserError, match="environment 'digits' returned") as caught:
        rollout(make_parts(Wrong), samples(1), torch.arange(1))
    assert says in str(caught.value)


def test_each_call_is_answered_once(make_parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    monkeypatch.setattr(
        "rlframework.datasets.chat.chat_format.ChatFormat.parse",
        lambda self, ids, tools=(), position=0: {"role": "assistant", "content": "1", "tool_calls": [call]},
    )

    class Twice(Counter):
        async def step(self, message: Any) -> Any:
            answer = {"role": "tool", "content": "1", "tool_call_id": "c0"}
            return StepOutcome(0.0, False, (answer, answer))

    with pytest.raises(UserError, match="tool_call_id='c0'; calls without an answer: none"):
        rollout(make_parts(Twice), samples(1), torch.arange(1))


@pytest.mark.slow
def test_wrong_tools_and_a_step_that_is_no_coroutine(make_parts: Any) -> None:
    for wrong in ([{"name": "add"}], [{"type": "function", "function": {"name": ""}}], "add",
                  [{"type": "function", "function": {"name": "add"}}] * 2):  # fmt: skip

        class Tools(Counter):
            tools = wrong  # type: ignore[assignment]

        with pytest.raises(UserError, match=r"in reset the tool .*with a name of its own"):
            rollout(make_parts(Tools), samples(1), torch.arange(1))

    class Plain(Counter):
        def step(self, message: Any) -> Any:  # type: ignore[override]
            return StepOutcome(1.0)

    with pytest.raises(UserError, match="define it with `async def step`"):
        rollout(make_parts(Plain), samples(1), torch.arange(1))


@pytest.mark.parametrize(("turn", "where"), [(0, "in reset"), (1, "in turn 1")])
def test_text_without_tokens_names_sample_and_turn(make_parts: Any, turn: int, where: str) -> None:
    class Foreign(Counter):
        async def reset(self) -> Any:
            return [{"role": "user", "content": "1+ℵ=" if turn == 0 else "1+1="}]

        async def step(self, message: Any) -> StepOutcome:
            return StepOutcome(0.0, False, ({"role": "user", "content": "ℵ"},))

    says = rf"environment '\w+' returned for sample 's0' {where} messages that .*no token for \['ℵ'\]"
    with pytest.raises(DataError, match=says):
        rollout(make_parts(Foreign), samples(1), torch.arange(1))
