"""Rows of exact tokens: trajectories by hand, and episodes with chat templates of published models."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import published_templates
import pytest
import torch
from chat_formats import MARKS, NAMES, SPACES, SPECIAL, TOOLS, Turn, result, sampled, tokenizer, written

from rlframework.base.errors import DataError
from rlframework.datasets.chat.chat_format import ChatFormat
from rlframework.datasets.chat.chat_template import apply_template
from rlframework.interfaces.generation import GenerationResult, WeightSpan
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
    """Of 10 episodes: each token and log-probability is in one row, once, unchanged."""
    for seed in range(10):
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


def turn(ids: list[int], version: int = 0) -> GenerationResult:
    logprobs = -torch.tensor(ids, dtype=torch.float32) / 10
    return GenerationResult("r", torch.tensor(ids), logprobs, "stop", (WeightSpan(0, len(ids), version),))


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_prompts_that_repeat_all_tokens_extend_one_row() -> None:
    made = Trajectory()
    assert made.add(ids(1, 2), turn([3, 4], version=7)) == 0
    assert made.add(ids(1, 2, 3, 4, 5), turn([6], version=8)) == 0
    [row] = made.rows
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.token_mask.tolist() == [False, False, True, True, False, True]
    assert row.logprobs.tolist() == pytest.approx([0, 0, -0.3, -0.4, 0, -0.6])
    assert row.turns.tolist() == [-1, -1, 0, 0, -1, 1]
    assert row.spans == (WeightSpan(2, 4, 7), WeightSpan(5, 6, 8))
    assert (made.turns, made.breaks, made.tokens) == (2, 0, 6)
    assert (row.token_ids.dtype, row.logprobs.dtype, row.turns.dtype) == (torch.int64, torch.float32, torch.int64)


@pytest.mark.parametrize("prompt", [(1, 2, 9, 4, 5), (1, 2, 3), (1, 2), (1, 2, 3, 5)])
def test_a_prompt_that_changes_history_begins_a_row(prompt: tuple[int, ...]) -> None:
    made = Trajectory()
    made.add(ids(1, 2), turn([3, 4]))
    assert made.add(ids(*prompt), turn([6])) == 1
    assert made.rows[1].token_ids.tolist() == [*prompt, 6]
    assert made.rows[1].token_mask.tolist() == [False] * len(prompt) + [True]
    assert made.rows[1].turns.tolist() == [-1] * len(prompt) + [1]
    assert made.rows[0].token_ids.tolist() == [1, 2, 3, 4]
    assert (made.turns, made.breaks, made.tokens) == (2, 1, 4 + len(prompt) + 1)


def test_the_longest_row_is_extended() -> None:
    made = Trajectory()
    made.add(ids(1), turn([2]))
    made.add(ids(1), turn([2, 3]))  # another answer to the same prompt
    made.add(ids(1, 2, 3, 4), turn([5]))
    assert [row.token_ids.tolist() for row in made.rows] == [[1, 2], [1, 2, 3, 4, 5]]
    assert made.rows[1].turns.tolist() == [-1, 1, 1, -1, 2]
    assert made.breaks == 1


def test_a_turn_needs_a_logprob_for_each_token() -> None:
    bad = GenerationResult("r7", ids(1, 2), torch.zeros(1), "stop", ())
    with pytest.raises(ValueError, match="request 'r7' has 2 tokens and 1 log-probabilities"):
        Trajectory().add(ids(1), bad)


ASK: Message = {"role": "user", "content": "1+2?"}
PIECES = (
    '{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "parameters": {"a":', '{"a": "\\ud83d"}',
    '{"name": "\\ud800", "arguments": "x"}', "[1]", "null", '"', "'", "\n", "{", "}", "[", "add(a=1)", "é 日本 😀",
    "\\", "the answer is 3", "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=add>", "<parameter=a>",
    "</parameter>", "</function>", "<arg_key>a</arg_key>", "<arg_value>", "<|tool_call_start|>", "[add(a=1)]",
    "<|tool_call_end|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", ";", "{{ x }}", "{% if %}", '{"a":' * 3000, "\x00",
)  # fmt: skip


def native_call(model: Any) -> str:
    """A call of `add` as the template of `model` writes it, and what it writes before."""
    call: Any = {"id": "abcdef000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    try:
        return apply_template(model, [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}], TOOLS)[-200:]
    except DataError:
        return PIECES[0]


def hostile_turn(name: str, model: Any, rng: random.Random) -> str:
    """A native call with up to three changes, or pieces of calls and marks of the template in any order."""
    if rng.random() < 0.3:
        return "".join(rng.choices([*PIECES, *published_templates.marks(name)], k=rng.randint(0, 8)))
    text = native_call(model)
    start = text.rfind(rng.choice(["add", "<", "[", "{"])) if rng.random() < 0.3 else text.find("assistant")
    text = text[max(start, 0) :]
    for _ in range(rng.randint(0, 3)):
        begin = rng.randint(0, len(text))
        end = min(len(text), begin + rng.randint(0, 12))
        text = rng.choice(
            [
                text[:begin] + text[end:],
                text[:begin] + rng.choice(PIECES) + text[begin:],
                text[:begin],
                text + text[begin:],
            ]
        )
    return text


def answers(reply: Message) -> list[Message]:
    """The messages of an environment after `reply`: an error for each call, with its name, or another question."""
    calls = reply.get("tool_calls", ())
    results: list[Message] = [
        {"role": "tool", "content": f"error: {call['function']['name']}", "tool_call_id": call["id"]} for call in calls
    ]
    return results or [{"role": "user", "content": "again"}]


def play(name: str, tools: list[Any], rng: random.Random) -> int:
    """Play two turns with the template; return how many had calls."""
    model = published_templates.with_template(name)
    chat = ChatFormat(model)
    messages, calling = [ASK], 0
    try:
        prompt = chat.prompt(messages, tools)
    except DataError:  # before anything is sampled
        return 0
    for _ in range(2):
        ids = model(hostile_turn(name, model, rng), add_special_tokens=False)["input_ids"]
        ids += [model.eos_token_id] if rng.random() < 0.8 else []
        reply = chat.parse(ids, tools, position=len(messages))
        assert tools or "tool_calls" not in reply
        calling += "tool_calls" in reply
        new = answers(reply)
        extended = chat.extend([*prompt, *ids], [*messages, reply], new, tools)
        messages = [*messages, reply, *new]
        prompt = chat.prompt(messages, tools) if extended is None else extended
    return calling


@pytest.mark.slow
def test_a_conversation_goes_on_whatever_a_model_writes() -> None:
    """3 conversations with and without tools for each 20th template, of which three quarters take tools."""
    calling = 0
    for name in published_templates.names()[::20]:
        rng = random.Random(name)
        calling += sum(play(name, tools, rng) for _ in range(3) for tools in (TOOLS, []))
    assert calling > 50
