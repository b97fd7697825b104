"""Episodes with chat templates of published models: training rows hold the tokens that the engine returned."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import torch
from chat_formats import MARKS, NAMES, SPACES, SPECIAL, TOOLS, Turn, result, sampled, tokenizer, written

from rlframework.datasets.chat.chat_format import ChatFormat
from rlframework.interfaces.generation import GenerationResult
from rlframework.interfaces.messages import Message
from rlframework.rollout.trajectory import Trajectory

WORDS = ["the", "answer", "is", "12", "sum", "né", "日本", "{x}", "a\nb", "  two", "😀", "</tool", '"', "assistant"]


def words(rng: random.Random, spelled: tuple[str, ...] = ()) -> str:
    """Text without space at its ends, and with special tokens spelled in it."""
    return " ".join(rng.choices([*WORDS, *spelled], k=rng.randint(1, 5))).strip()


def random_turn(name: str, rng: random.Random) -> Turn:
    thinks = name in ("qwen3", "gpt_oss") and rng.random() < 0.5
    call = {"a": rng.randint(0, 99), "b": words(rng)} if rng.random() < 0.5 else None
    content = "" if call is not None else words(rng)
    return Turn(content, words(rng) if thinks else None, call)


def breaks_expected(
    name: str, tools: bool, messages: list[Message], turns: list[tuple[Turn, bool]], new: Message
) -> bool:
    """Whether the template rewrites history for `new`, from its rules; `turns`: since the last user, and if cut off."""
    if name == "mistral":  # the system message is in the last message if a user wrote that, the tools in a user's last
        moved = messages[0]["role"] == "system" and messages[-1]["role"] == "user"
        return moved or (tools and new["role"] == "user")
    if new["role"] != "user" or name not in ("qwen3", "gpt_oss"):
        return False
    if any(turn.reasoning for turn, _ in turns):
        return True  # reasoning is dropped
    return name == "gpt_oss" and not turns[-1][1]  # <|return|> becomes <|end|>


class Played:
    """An episode that was played, with everything that the engine returned."""

    def __init__(self, name: str, seed: int) -> None:
        rng = random.Random(f"{name} {seed}")
        self.model = tokenizer(name)
        self.chat, self.trajectory = ChatFormat(self.model), Trajectory()
        self.results: list[GenerationResult] = []
        self.breaks = 0
        tools = TOOLS if rng.random() < 0.5 else []
        spelled = (*SPECIAL[name], *MARKS)
        system: Message = {"role": "system", "content": "be brief"}
        messages: list[Message] = [system] if rng.random() < 0.5 and name != "gemma2" else []  # has no system role
        messages.append({"role": "user", "content": words(rng, spelled)})
        prompt = self.chat.prompt(messages, tools)
        recent: list[tuple[Turn, bool]] = []
        for _ in range(rng.randint(2, 5)):
            turn = random_turn(name, rng)
            text, end = written(name, turn)
            cut = turn.arguments is None and rng.random() < 0.1
            ids = sampled(name, text if cut else text + end, rng)
            self.results.append(result(ids, rng, "length" if cut else "stop"))
            self.trajectory.add(torch.tensor(prompt), self.results[-1])
            history = [*prompt, *ids]
            reply = self.chat.parse(ids, TOOLS, position=len(messages))
            check_reply(reply, turn)
            recent.append((turn, cut))
            new: Message = {"role": "user", "content": words(rng, spelled)}
            if turn.arguments is not None:
                new = {"role": "tool", "content": words(rng, spelled), "name": "add"}
                new["tool_call_id"] = reply["tool_calls"][0]["id"]
            extended = self.chat.extend(history, [*messages, reply], [new], tools)
            assert (extended is None) == breaks_expected(name, bool(tools), messages, recent, new), (name, seed)
            rendered = self.chat.prompt([*messages, reply, new], tools)
            if extended is not None:
                assert extended[: len(history)] == history
                assert self.same_text(extended, rendered)
            messages += [reply, new]
            if new["role"] == "user":
                recent = []
            self.last, prompt = extended is None, rendered if extended is None else extended
            self.breaks += self.last

    def same_text(self, extended: list[int], rendered: list[int]) -> bool:
        """Whether the exact tokens have the text that the template renders; Mistral's adds ids to calls."""
        model: Any = self.model
        one, other = (re.sub(', "id": "[0-9a-f]{9}"', "", model.decode(ids)) for ids in (extended, rendered))
        return one == other


def check_reply(reply: Message, turn: Turn) -> None:
    if turn.arguments is None:
        assert "tool_calls" not in reply
        assert str(reply["content"]).strip() == turn.content
    else:
        [call] = reply["tool_calls"]
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == turn.arguments
    assert reply.get("reasoning_content") == turn.reasoning


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_rows_hold_what_the_engine_returned(name: str) -> None:
    """110 episodes: each token and log-probability is in one row, once, unchanged."""
    check_episodes(name, range(10))


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_1000_episodes_hold_what_the_engine_returned(name: str) -> None:
    check_episodes(name, range(10, 10 + 91))


def check_episodes(name: str, seeds: range) -> None:
    for seed in seeds:
        played = Played(name, seed)
        rows, results = played.trajectory.rows, played.results
        for number, sent in enumerate(results):
            [row] = [row for row in rows if bool((row.turns == number).any())]
            places = (row.turns == number).nonzero().flatten()
            assert places.tolist() == list(range(int(places[0]), int(places[0]) + len(sent.token_ids)))
            assert torch.equal(row.token_ids[places], sent.token_ids)
            assert torch.equal(row.logprobs[places], sent.logprobs)
            spans = [span for span in row.spans if places[0] <= span.start <= places[-1]]
            assert [(s - int(places[0]), e - int(places[0]), v) for s, e, v in spans] == [tuple(s) for s in sent.spans]
        assert sum(int(row.token_mask.sum()) for row in rows) == sum(len(sent.token_ids) for sent in results)
        for row in rows:
            assert torch.equal(row.token_mask, row.turns >= 0)
            assert not row.logprobs[~row.token_mask].any()
        assert played.trajectory.breaks == played.breaks - played.last


def unspaced(name: str, text: str) -> str:
    """`text`, without spaces for a tokenizer that puts one before each text."""
    return text.replace(" ", "") if SPACES.get(name) == "always" else text


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_in_observations_stay_text(name: str) -> None:
    chat, model = ChatFormat(tokenizer(name)), tokenizer(name)
    rng = random.Random(0)
    ask: Message = {"role": "user", "content": "a"}
    text, end = written(name, Turn("", None, {"a": 1}))
    ids = sampled(name, text + end, rng)
    call = chat.parse(ids, TOOLS)
    history = [*chat.prompt([ask]), *ids]

    def added(content: str) -> list[int]:
        new: Message = {"role": "tool", "content": content, "tool_call_id": call["tool_calls"][0]["id"]}
        found = chat.extend(history, [ask, call], [new])
        assert found is not None
        return found[len(history) :]

    known = set(model.added_tokens_decoder)
    attack = "x".join((*SPECIAL[name], *MARKS))
    for content in (attack, attack * 2, f"<{attack}"):
        plain, spelled = added("harmless"), added(content)
        assert [token for token in spelled if token in known] == [token for token in plain if token in known]
        assert unspaced(name, content) in unspaced(name, model.decode(spelled))
    first = [{**ask, "content": attack}]
    assert unspaced(name, attack) in unspaced(name, model.decode(chat.prompt(first)))
    assert [t for t in chat.prompt(first) if t in known] == [t for t in chat.prompt([ask]) if t in known]


@pytest.mark.parametrize("name", NAMES)
def test_ends_of_turns(name: str) -> None:
    ends = {written(name, turn)[1] for turn in (Turn("a"), Turn("", None, {"a": 1}))}
    model = tokenizer(name)
    assert set(model.convert_ids_to_tokens(list(ChatFormat(model).turn_end_ids))) == ends
