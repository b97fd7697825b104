"""Episodes: rows of exact tokens, budgets, requests that reach the engine together, independence of the others."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from scripted_episodes import END, Counter, samples

from rlframework.base.errors import RefitError
from rlframework.datasets.chat.chat_format import ChatFormat, characters_of
from rlframework.interfaces.environment import StepOutcome
from rlframework.interfaces.generation import SamplingParams
from rlframework.interfaces.messages import Picture
from rlframework.rollout.episode_thread import Bridge, run_beside
from rlframework.rollout.result import PlayedEpisode, Rollout
from rlframework.rollout.seeds import task_seeds, turn_seed
from rlframework.rollout.single_turn import single_turns
from rlframework.rollout.step_rollouts import rollout


def ids(parts: Any, text: str) -> list[int]:
    return list(parts.tokenizer(text)["input_ids"])


def right(parts: Any) -> Any:
    """The right answer to each prompt of `Counter` with one digit: the sum of its digits."""
    return lambda request: [*ids(parts, str(sum(map(int, filter(str.isdigit, seen(parts, request)))))), END]


def seen(parts: Any, request: Any) -> str:
    text = parts.tokenizer.decode(request.prompt_ids, skip_special_tokens=True)
    return text if text.count("=") == 1 else text[text.index("=") + 1 :]


@pytest.mark.slow
def test_an_episode_is_one_row_of_prompt_turns_and_observations(make_parts: Any) -> None:
    parts = make_parts(Counter)
    parts.engine.answer = right(parts)
    result = rollout(parts, samples(3), torch.tensor([11, 12, 13]))
    row = [*ids(parts, "2+1="), *ids(parts, "3"), END, *ids(parts, "+1="), *ids(parts, "4"), END]
    assert result.data["input_ids"][2].tolist() == row
    assert result.data["input_lengths"].tolist() == [len(row)] * 3
    mask = [0.0] * 4 + [1.0] * 2 + [0.0] * 3 + [1.0] * 2
    assert result.data["token_mask"][2].tolist() == mask
    expected = torch.tensor([position / -100 for position in range(len(row))]) * torch.tensor(mask)
    assert torch.equal(result.data["generation_logprobs"][2], expected)
    assert result.data["sample_mask"].tolist() == [1.0] * 3
    assert result.episode_of.tolist() == [0, 1, 2]
    assert result.rewards.tolist() == [2.0] * 3
    assert result.accuracies.tolist() == [1.0] * 3
    assert result.completion_lengths.tolist() == [4] * 3
    assert result.completions == ["2", "3", "4"]
    turns = [(turn["role"], turn["trained"], turn.get("reward")) for turn in result.transcripts[2]]
    assert turns == [("user", False, None), ("assistant", True, 1.0)] * 2
    expected_metrics = {
        "reward": 2.0, "accuracy": 1.0, "completion_length": 4.0, "truncated_fraction": 0.0, "episode_turns": 2.0,
        "episode_rows": 1.0, "tool_calls": 0.0, "malformed_tool_calls": 0.0, "template_breaks": 0.0,
        "failed_episodes": 0.0, "reward/right": 2.0, "truncated/max_new_tokens": 0.0, "truncated/max_turns": 0.0,
        "truncated/max_episode_tokens": 0.0, "truncated/agent_request": 0.0, "tool_errors": 0.0,
        "failed_fraction": 0.0,
    }  # fmt: skip
    assert result.metrics == expected_metrics
    assert all(episode.closed == 1 for episode in parts.environment.episodes)


def test_a_turn_stops_at_the_end_of_turns_of_the_chat_template(make_parts: Any) -> None:
    """Which is not the tokenizer's end of sequence here, as in many base models."""
    parts = make_parts(Counter)
    parts.tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    parts.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    )
    turn_end = parts.tokenizer.convert_tokens_to_ids("<|im_end|>")
    rollout(parts, samples(1), torch.tensor([11]))
    [request, *_] = parts.engine.exchanges[0]
    assert request.sampling.stop_token_ids == {END, turn_end}


def test_turns_have_their_own_seeds_and_an_episode_its_session(make_parts: Any) -> None:
    parts = make_parts(Counter)
    rollout(parts, samples(2), torch.tensor([11, 12]))
    requests = [request for exchange in parts.engine.exchanges for request in exchange]
    sessions = dict.fromkeys(request.session_id for request in requests)
    assert len(sessions) == 2
    assert None not in sessions
    for session, seed in zip(sessions, (11, 12), strict=True):
        own = [request for request in requests if request.session_id == session]
        assert [request.seed for request in own] == [seed, turn_seed(seed, 1)]
    assert len({request.request_id for request in requests}) == 4
    assert turn_seed(11, 1) not in (11, turn_seed(12, 1), turn_seed(11, 2))


def exchanged(parts: Any) -> list[list[tuple[str, int]]]:
    """Prompts and seeds of each exchange, in some order that does not depend on time."""
    return [
        sorted((str(request.prompt_ids.tolist()), request.seed) for request in exchange)
        for exchange in parts.engine.exchanges
    ]


@pytest.mark.slow
def test_which_requests_reach_the_engine_together_does_not_depend_on_time(make_parts: Any) -> None:
    """A request that comes late is not decoded before the engine returns, so an exchange waits for all that are open.

    The next episode begins before one ends, or an exchange between the two would not wait for it.
    """

    class Sleepy(Counter):
        async def step(self, message: Any) -> StepOutcome:
            await asyncio.sleep((self.seed % 7) / 100)
            return await super().step(message)

    keys = ["environment.gather_timeout=300", "environment.max_concurrent_episodes=12"]
    found = []
    for kind in (Counter, Sleepy):
        parts = make_parts(kind, None, *keys)
        rollout(parts, samples(4) * 8, torch.arange(32))
        found.append(exchanged(parts))
    assert [len(exchange) for exchange in found[0]] == [12, 12, 12, 12, 8, 8]
    assert found[0] == found[1]


@pytest.mark.slow
def test_an_exchange_waits_for_a_slow_episode_no_longer_than_its_deadline(make_parts: Any) -> None:
    """The slow one waits for the second turn of the other, which would wait for it."""
    passed = asyncio.Event()

    class Waits(Counter):
        async def step(self, message: Any) -> StepOutcome:
            if self.sample.id == "s0":
                await passed.wait()
            elif self.turn == 1:
                passed.set()
            return await super().step(message)

    parts = make_parts(Waits, None, "environment.gather_timeout=1", "environment.step_timeout=300")
    result = rollout(parts, samples(2), torch.arange(2))
    assert not result.failed.any()
    assert [len(exchange) for exchange in parts.engine.exchanges if exchange] == [2, 1, 1]


@pytest.mark.slow
def test_attempts_at_a_sample_begin_with_the_same_task(make_parts: Any) -> None:
    parts, (one, two) = make_parts(Counter), samples(2)
    rollout(parts, [one, one, two, two], torch.tensor([1, 2, 3, 4]))
    seeds = [episode.seed for episode in parts.environment.episodes]
    assert seeds == task_seeds([one, one, two, two], [1, 2, 3, 4])
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert seeds[0] not in (1, 2)


def hashed(request: Any) -> list[int]:
    """Up to six tokens that depend on prompt and seed."""
    mixed = hash((tuple(request.prompt_ids.tolist()), request.seed))
    return [*(5 + (mixed >> shift) % 10 for shift in range(0, 4 * (1 + mixed % 5), 4)), END]


def test_an_episode_that_changes_its_sample_changes_no_other(make_parts: Any) -> None:
    class Extended(Counter):
        async def reset(self) -> Any:
            self.sample.messages[0]["content"] += "4="
            return self.sample.messages

    picture = Picture(b"", "nowhere")
    task = replace(samples(1)[0], metadata={"picture": picture})
    parts = make_parts(Extended, "environment.max_turns=1")
    parts.engine.answer = right(parts)
    result = rollout(parts, [task] * 3, torch.arange(3))
    assert [turns[0]["content"] for turns in result.transcripts] == ["0+1=4="] * 3
    assert all(episode.sample.metadata["picture"] is picture for episode in parts.environment.episodes)


@pytest.mark.slow
def test_rows_depend_on_neither_the_other_episodes_nor_their_order_in_time(make_parts: Any) -> None:
    class Sleepy(Counter):
        async def step(self, message: Any) -> StepOutcome:
            await asyncio.sleep((hash(self.sample.id) % 7) / 500)
            return await super().step(message)

    some, seeds = samples(9), torch.arange(100, 109)
    results = [
        rollout(make_parts(kind, hashed, *overrides), some[start:end], seeds[start:end])
        for kind, start, end, overrides in (
            (Counter, 0, 9, ()),
            (Sleepy, 0, 9, ()),
            (Sleepy, 3, 6, ()),
            (Counter, 0, 9, ("environment.max_concurrent_episodes=2",)),
        )
    ]
    whole, sleepy, part, few = results
    for other in (sleepy, few):
        for key, value in whole.data.items():
            assert torch.equal(value, other.data[key]), key
    for mine, row in enumerate(range(3, 6)):
        length = int(whole.data["input_lengths"][row])
        assert part.data["input_ids"][mine, :length].tolist() == whole.data["input_ids"][row, :length].tolist()


def test_an_episode_of_one_turn_is_the_single_turn(make_parts: Any) -> None:
    class Once(Counter):
        async def step(self, message: Any) -> StepOutcome:
            return StepOutcome(1.0, done=True)

    parts = make_parts(Once, hashed)
    episodes = rollout(parts, samples(5), torch.arange(5))
    parts.environment.step = lambda some, talks: [StepOutcome(1.0) for _ in some]
    single = single_turns(parts, samples(5), torch.arange(5))
    assert episodes.data.keys() == single.data.keys()
    for key, value in single.data.items():
        assert torch.equal(value, episodes.data[key]), key
    assert episodes.completions == single.completions
    assert torch.equal(episodes.completion_lengths, single.completion_lengths)
    assert torch.equal(episodes.truncated, single.truncated)
    assert single.episode_of.tolist() == [0, 1, 2, 3, 4]
    assert not single.failed.any()


def test_rewards_and_metrics_add_up_and_the_last_accuracy_counts() -> None:
    turns = [{"accuracy": 1.0, "steps": 1.0}, {"accuracy": 0.5, "steps": 2.0}, {"late": 4.0}]
    outcomes = [StepOutcome(0.25, False, metrics=metrics) for metrics in turns]
    total = PlayedEpisode(samples(1)[0], (), (), outcomes).total
    assert total.reward == 0.75
    assert total.metrics == {"accuracy": 0.5, "steps": 3.0, "late": 4.0}
    failed = PlayedEpisode(samples(1)[0], (), (), outcomes, failure="lost").total
    assert (failed.reward, failed.metrics) == (0.0, {"accuracy": 0.0})


# -- budgets ---------------------------------------------------------------------------------------------------------


class Endless(Counter):
    async def step(self, message: Any) -> StepOutcome:
        return StepOutcome(0.5, False, ({"role": "user", "content": "+1="},))


def truncated_at(result: Rollout) -> dict[str, float]:
    """The fractions of episodes that each limit has truncated, which add up to `truncated_fraction`."""
    found = {name: value for name, value in result.metrics.items() if name.startswith("truncated/")}
    assert sum(found.values()) == result.metrics["truncated_fraction"] == result.truncated.float().mean()
    return {name.removeprefix("truncated/"): value for name, value in found.items() if value}


@pytest.mark.parametrize(
    ("ids", "keys", "reward", "lengths", "limit"),
    [
        ([5, END], "environment.max_turns=3", 1.5, [6, 16], "max_turns"),
        ([5] * 20, "environment.max_turns=3", 0.5, [8, 12], "max_new_tokens"),
        ([5, END], "environment.max_episode_tokens=10", 1.0, [3, 10], "max_episode_tokens"),
        # an observation without a turn after it is not trained on
        ([5, END], "environment.max_episode_tokens=9", 0.5, [2, 6], "max_episode_tokens"),
        ([5] * 200 + [END], "generation.max_new_tokens=1000", 0.5, [124, 128], "max_episode_tokens"),  # of the model
    ],
)
def test_a_budget(make_parts: Any, ids: list[int], keys: str, reward: float, lengths: list[int], limit: str) -> None:
    """Prompts and observations have 4 and 3 tokens. The turn that is cut is scored, and ends the episode."""
    result = rollout(make_parts(Endless, lambda request: ids, keys), samples(2), torch.arange(2))
    assert result.rewards.tolist() == [reward] * 2
    assert [result.completion_lengths.tolist(), result.data["input_lengths"].tolist()] == [[n] * 2 for n in lengths]
    assert truncated_at(result) == {limit: 1.0}


def test_an_episode_that_is_done_with_its_last_turn_is_not_truncated(make_parts: Any) -> None:
    result = rollout(make_parts(Counter, None, "environment.max_turns=2"), samples(2), torch.arange(2))
    assert result.truncated.tolist() == [False, False]


def test_a_first_prompt_without_room_is_a_failure(make_parts: Any) -> None:
    class Long(Counter):
        async def reset(self) -> Any:
            return [{"role": "user", "content": "1" * (50 if self.sample.id == "s0" else 1)}]

    result = rollout(make_parts(Long, None, "environment.max_episode_tokens=20"), samples(2), torch.arange(2))
    assert result.failed.tolist() == [True, False]
    assert "its first prompt has 50 tokens" in result.failures[0]


def test_a_text_that_cannot_fit_is_not_tokenised(make_parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of it in the event loop of all episodes would end the run, and the environment would be blamed."""
    tokenised: list[int] = []
    prompt = ChatFormat.prompt

    def noted(self: Any, messages: Any, tools: Any = ()) -> list[int]:
        tokenised.append(characters_of(messages))
        return prompt(self, messages, tools)

    class Long(Endless):
        async def reset(self) -> Any:
            return [{"role": "user", "content": "1" * (10**6 if self.sample.id == "s0" else 1)}]

        async def step(self, message: Any) -> Any:
            outcome = await super().step(message)
            return replace(outcome, observations=[{"role": "user", "content": "1" * 10**6}])

    monkeypatch.setattr(ChatFormat, "prompt", noted)
    monkeypatch.setattr(ChatFormat, "extend", None)
    result = rollout(make_parts(Long), samples(2), torch.arange(2))
    assert "its first prompt has 1,000,000 characters" in result.failures[0]
    assert result.failures[1] == ""
    assert result.metrics["truncated/max_episode_tokens"] == 1.0
    assert tokenised == [1]


def test_mixed_weights_are_an_error(make_parts: Any) -> None:
    parts = make_parts(Counter)

    def answer(request: Any) -> list[int]:
        parts.engine.version += 1
        return [5, END]

    parts.engine.answer = answer
    with pytest.raises(RefitError, match=r"sampled with weights of versions \[8, 9\]"):
        rollout(parts, samples(1), torch.arange(1))


class RecordingCompletions:
    """The result of a completion is its seed."""

    positions, max_new_tokens, sampling, timeline = None, 4, SamplingParams(), None

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def session(self) -> str:
        return "session"

    async def complete(self, _prompt: Any, seed: int, most: int, media: Any = None) -> int:
        assert (most, media) == (4, {"pixels": 1})
        self.seeds.append(seed)
        await asyncio.sleep(0)
        return seed


def test_engines_wait_for_all_rows_of_a_group_that_has_begun() -> None:
    async def main() -> tuple[list[int], Any]:
        given: Any = RecordingCompletions()
        bridge, begun = Bridge(given, timeout=60.0), threading.Event()

        async def work() -> list[Any]:
            session = bridge.begin()
            begun.set()
            await asyncio.sleep(0.05)
            media: Any = {"pixels": 1}
            rows = await bridge.complete_group(torch.tensor([5]), [3, 1, 2], session, media)
            bridge.end(session)
            return rows

        beside = asyncio.create_task(run_beside(work, stalled_after=60.0, name="digits"))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        await bridge.gather()
        return list(given.seeds), await beside

    assert asyncio.run(main()) == ([3, 1, 2], [3, 1, 2])
