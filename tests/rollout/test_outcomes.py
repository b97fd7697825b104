"""Checks of what environments return, and what records and metrics make of it, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripted_episodes import samples

from rlframework.base.errors import UserError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.environment import Sample, StepOutcome
from rlframework.rollout.outcomes import EpisodeChecks, outcome_metrics
from rlframework.rollout.result import Rollout, with_special_tokens

USER: Any = {"role": "user", "content": "1"}
CALL: Any = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CALLS: Any = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWER: Any = {"role": "tool", "content": "1", "tool_call_id": "c"}
TOOL: Any = {"type": "function", "function": {"name": "add"}}


def checks() -> EpisodeChecks:
    return EpisodeChecks("digits", samples(1)[0])


@pytest.mark.parametrize("messages", [[USER], [USER, CALLS, ANSWER], [{"role": "system", "content": "1"}]])
def test_a_conversation_that_the_model_continues(messages: Any) -> None:
    assert checks().start(messages) == tuple(messages)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "no message; it must be a conversation that the model's turn follows"),
        ([USER, CALLS], "an assistant message at the end; it must be"),
        ([USER, CALLS, ANSWER, ANSWER], "tool_call_id='c'; calls without an answer: none"),
        ([USER, CALLS, USER, CALLS, {**ANSWER, "tool_call_id": "d"}], "calls without an answer: 'c'"),
    ],
)
def test_a_conversation_that_it_cannot_continue(messages: Any, says: str) -> None:
    with pytest.raises(UserError, match="environment 'digits' returned for sample 's0' in reset") as caught:
        checks().start(messages)
    assert says in str(caught.value)


@pytest.mark.parametrize("turn", [0, 2])
@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("not a list", "'not a list' of type str; it must be a sequence of messages"),
        (["text"], "'text' of type str as a message"),
        ([{"role": "user", "content": None}], "with the content None of type NoneType"),
        ([{"role": "user", "content": [{"type": "image"}]}], "with the content {'type': 'image'}"),
        ([{"role": "robot", "content": "1"}], "a message with role='robot'; it must be one of system, user"),
        ([{"content": "1"}], "a message with role=None"),
        ([{**USER, "colour": "red"}], "a message with colour; the keys are content, name"),
        ([{"role": "tool", "content": "1"}], "none. A tool that the model calls in plain text, not in `tool_calls`,"),
    ],
)
def test_wrong_messages_name_environment_sample_and_turn(messages: Any, says: str, turn: int) -> None:
    with pytest.raises(UserError) as caught:
        checks().outcome(StepOutcome(0.0, False, messages), turn, ()) if turn else checks().start(messages)
    where = "turn 2" if turn else "reset"
    assert str(caught.value).startswith(f"environment 'digits' returned for sample 's0' in {where} ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (None, "None of type NoneType; step must return a StepOutcome"),
        ((1.0, True), "of type tuple; step must return a StepOutcome"),
        (StepOutcome(float("nan")), "reward=nan for sample 's0' in turn 1"),
        (StepOutcome(1.0, metrics={"steps": "two"}), "steps='two' for sample 's0' in turn 1"),  # type: ignore[dict-item]
        (StepOutcome(1.0, done="no"), "done='no'"),  # type: ignore[arg-type]
        (StepOutcome(1.0, metrics=[1]), "metrics=[1]"),  # type: ignore[arg-type]
        (StepOutcome(1.0, done=False), "no observations, although the episode is not done"),
        (StepOutcome(1.0, False, ({"role": "assistant", "content": "1"},)), "role='assistant'"),
        (StepOutcome(1.0, False, (ANSWER, ANSWER)), "tool_call_id='c'; calls without an answer: none"),
    ],
)
def test_wrong_outcomes(outcome: Any, says: str) -> None:
    with pytest.raises(UserError, match="environment 'digits' returned") as caught:
        checks().outcome(outcome, 1, [CALL])
    assert says in str(caught.value)


@pytest.mark.parametrize("tools", [[{"name": "add"}], [{**TOOL, "function": {"name": ""}}], "add", [TOOL, TOOL]])
def test_wrong_tools(tools: Any) -> None:
    with pytest.raises(UserError, match=r"in reset the tool .*with a name of its own"):
        checks().tools(tools)


def test_metrics_of_outcomes() -> None:
    outcomes = [
        StepOutcome(1.0, metrics={"steps": 1.0, "accuracy": 1.0, "reward_failures": 1.0}),
        StepOutcome(0.0, metrics={"steps": 4.0, "reward_failures": 1.0}),
        StepOutcome(0.0, metrics={"late": 3.0}),
    ]
    assert outcome_metrics(outcomes) == {"reward_failures": 2.0, "reward/steps": 2.5, "reward/late": 3.0}
    assert outcome_metrics([]) == {}


# -- special tokens that the text of an answer hides -------------------------------------------------------------------

TOKENIZER: Any = character_tokenizer("ab")
PAD, EOS = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id
A, B = TOKENIZER.convert_tokens_to_ids(["a", "b"])
SHOWN_PAD, SHOWN_EOS = TOKENIZER.pad_token, TOKENIZER.eos_token


@pytest.mark.parametrize(
    ("ids", "ended", "shown"),
    [
        ([A, B, EOS], True, ""),
        ([A, B], False, ""),
        ([], True, ""),
        ([EOS], True, SHOWN_EOS),
        ([PAD, PAD], False, SHOWN_PAD * 2),
        ([A, PAD, B, EOS], True, f"a{SHOWN_PAD}b{SHOWN_EOS}"),
        ([A, PAD], False, f"a{SHOWN_PAD}"),
    ],
)
def test_what_the_text_hides(ids: list[int], ended: bool, shown: str) -> None:
    assert with_special_tokens(TOKENIZER, ids, ended=ended) == shown


def record(ids: list[int], mask: list[int], transcripts: Any = (), *, truncated: bool = False) -> Any:
    """The record of a sample whose answer, or the last row of whose episode, has these tokens; padded by two."""
    data: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": torch.tensor([[A] * (len(ids) + 2), [*ids, PAD, PAD]]),
            "token_mask": torch.tensor([[0] * (len(ids) + 2), [*mask, 0, 0]]),
            "sample_mask": torch.ones(2),
        }
    )
    zero, rows, cut = torch.zeros(1), torch.zeros(2, dtype=torch.int64), torch.tensor([truncated])
    asked = [Sample("one", ({"role": "user", "content": "a"},), "b")]
    result = Rollout(asked, [""], data, zero, zero, zero, cut, {}, rows, zero.bool(), transcripts, [""])
    return result.records(1, "train", 1, TOKENIZER)[0]


def test_records_show_padding_that_was_sampled_and_not_the_end() -> None:
    assert record([A, PAD, PAD], [0, 1, 1], truncated=True).model_output == SHOWN_PAD * 2
    assert record([A, B, EOS], [0, 1, 1]).model_output == ""


@pytest.mark.parametrize(
    ("more", "shown"), [({}, SHOWN_PAD + SHOWN_EOS), ({"tool_calls": [{}]}, ""), ({"reasoning_content": "b"}, "")]
)
def test_the_last_turn_of_an_episode(more: dict[str, Any], shown: str) -> None:
    """Of the turns `b` and `<pad><eos>`; a turn whose special tokens were read as something hides nothing."""
    asked = {"role": "user", "content": "a", "trained": False}
    answered = {"role": "assistant", "trained": True, "reward": 0.0}
    turns = [asked, {**answered, "content": "b"}, asked, {**answered, "content": "", **more}]
    assert record([A, B, EOS, A, PAD, EOS], [0, 1, 1, 0, 1, 1], [turns]).model_output == shown
