"""Environments whose tasks are attempted by agents with a loop of their own, through an endpoint of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rlframework.base.errors import UserError
from rlframework.interfaces.environment import Environment, Sample, StepOutcome


class NoReward(UserError):
    """An attempt has no reward; the message says what the agent must return."""


@dataclass(frozen=True)
class AgentSession:
    """The endpoint as one attempt at a task sees it, in the terms of an OpenAI client.

    A reward may be posted to `{base_url}/sessions/{id}/reward`.
    """

    base_url: str
    api_key: str
    model: str
    id: str


@runtime_checkable
class RunsAgents(Protocol):
    """An environment whose tasks are attempted by agents, with the run's endpoint."""

    async def run_agent(self, sample: Sample, session: AgentSession) -> StepOutcome | None:
        """Run the agent on `sample`, once; return the reward that it returned, if any."""
        ...

    async def score_answer(self, sample: Sample, answer: str) -> StepOutcome:
        """Return the reward of the model's last message, for an agent that neither returned nor posted one.

        Raises `NoReward` if the environment has none for it, which costs this attempt alone.
        """
        ...


def runs_agents(environment: Environment) -> bool:
    """Whether attempts at the samples of `environment` are made by agents."""
    return isinstance(environment, RunsAgents)
