"""Checks of what environments return, and metrics of outcomes, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_episodes import samples

from rlframework.base.errors import UserError
from rlframework.interfaces.environment import StepOutcome
from rlframework.rollout.outcomes import EpisodeChecks, outcome_metrics

USER: Any = {"role": "user", "content": "1"}
CALL: Any = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CALLS: Any = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWER: Any = {"role": "tool", "content": "1", "tool_call_id": "c"}


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


def test_metrics_of_outcomes() -> None:
    outcomes = [
        StepOutcome(1.0, metrics={"steps": 1.0, "accuracy": 1.0, "reward_failures": 1.0}),
        StepOutcome(0.0, metrics={"steps": 4.0, "reward_failures": 1.0}),
        StepOutcome(0.0, metrics={"late": 3.0}),
    ]
    assert outcome_metrics(outcomes) == {"reward_failures": 2.0, "reward/steps": 2.5, "reward/late": 3.0}
    assert outcome_metrics([]) == {}
