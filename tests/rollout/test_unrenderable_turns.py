"""Turns of a model that a chat template takes in another form or not at all: they cost their episode alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from scripted_episodes import Counter, samples

from rlframework.base.errors import DataError
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.environment import StepOutcome
from rlframework.rollout.step_rollouts import rollout

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


@pytest.mark.parametrize("arguments", ['"x"', "[1]", "null", '{"a": "\\ud83d"}', "5}{"])
def test_a_call_that_the_template_takes_in_another_form_goes_on(make_parts: Any, arguments: str) -> None:
    result = play(make_parts, CALL.format(arguments))
    assert not result.failed.any()
    assert result.rewards.tolist() == [1.0, 1.0, 1.0]
    assert result.metrics["episode_turns"] == 2.0
    assert result.metrics["tool_calls"] == pytest.approx(1 / 3)


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


def test_tools_whose_calls_cannot_be_read_end_the_rollout_before_a_turn(make_parts: Any) -> None:
    with pytest.raises(
        DataError, match=r"^tools cannot be used with the chat template of .* it writes a call as '\[\{"
    ):
        play(make_parts, "2", template=TEMPLATE.replace("<tool_call>{{", "[{{"))


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
