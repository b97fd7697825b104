"""The environment interface: it supplies the prompts and scores the answers, of one turn, an episode or an agent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from rlframework.base.errors import NotSupported, UserError
from rlframework.interfaces.messages import Message, ToolSpec

if TYPE_CHECKING:
    from rlframework.config.sections import EnvironmentConfig

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Sample:
    """One task: the conversation so far, the reference answer, and a completion for supervised training.

    `completion`, or `answer` if there is no completion, is a correct reply to `messages`: an environment that scores
    must give it a higher reward than a wrong reply. If correct replies need a particular form, such as tags,
    `completion` shows that form. `tools`: those that the assistant may call in the conversation.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str
    completion: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[ToolSpec, ...] = ()

    def copy(self) -> Sample:
        """Return a sample whose messages, metadata and tools may be changed alone; images and tensors are shared."""
        return replace(self, **{name: _copied(getattr(self, name)) for name in ("messages", "metadata", "tools")})


def _copied(value: Any) -> Any:
    """`value` with copies of the dictionaries, lists and tuples in it."""
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


LARGEST_REWARD = 1e12
"""The largest size of a reward: the squares that a group's statistics sum stay far from fp32's largest number."""


@dataclass(frozen=True)
class StepOutcome:
    """The environment's response to one conversation: the reward of the turn, whether the conversation is done, and
    the messages that follow if it is not.

    `reward` and `metrics` are finite and at most `LARGEST_REWARD` in size.
    """

    reward: float
    done: bool = True
    observations: tuple[Message, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class Episode(ABC):
    """One attempt at a task, turn by turn: `reset`, `step` until its outcome is done, `close`.

    Episodes run concurrently in one event loop, so they share no state and block nothing: long work is awaited, in a
    thread if need be. An episode's reward is the sum of its outcomes' rewards.

    `tools`: what the model may call; fixed once `reset` has returned. Without any, calls that it writes are text.
    """

    tools: Sequence[ToolSpec] = ()

    @abstractmethod
    async def reset(self) -> Sequence[Message]:
        """Start, and return the messages that the model's first turn answers."""

    @abstractmethod
    async def step(self, message: Message) -> StepOutcome:
        """Respond to the model's turn. Unless the outcome is done, its `observations` are what the next turn answers.

        `message` has `tool_calls` if the model called tools; their arguments may be anything, since the model wrote
        them. A call that cannot be made is an observation that says why, for the model to read.
        """

    async def close(self) -> None:
        """Release the episode's resources. Called once, also after an error and without `reset`."""


class Environment(ABC):
    """Tasks with a reward. Must be deterministic given its configuration and seed, and cheap to construct.

    An environment of single turns implements `step`, one of several turns `episode`.

    `scores`: whether answers can be scored. If False, the environment only supplies samples to train on, and
    validation uses the loss on them.
    """

    scores: bool = True

    @abstractmethod
    def __init__(self, config: EnvironmentConfig, *, seed: int) -> None:
        """Load or generate the samples. Raise `DataError` with file and line number for an unreadable file or line."""

    @abstractmethod
    def samples(self, split: Split) -> Sequence[Sample]:
        """Return the samples of a split, always in the same order. No validation sample may be in the train split."""

    def start(self, folder: Path | None) -> None:
        """Check that what scoring needs can be used, such as a service; raise a `UserError` if not.

        Called once, before workers start and anything is scored, where a run or an evaluation starts; not where one is
        only planned. `folder` is the run's, None without one: files may be written there from the first `step` on.
        """

    def step(self, samples: Sequence[Sample], conversations: Sequence[Sequence[Message]]) -> list[StepOutcome]:
        """Score the last assistant turn of each conversation; return one outcome per conversation, in order.

        `conversations[i]` starts with `samples[i].messages` and ends with an assistant message. Must not modify its
        arguments.
        """
        raise NotSupported(f"{type(self).__name__} scores no single turns")

    def episode(self, sample: Sample, seed: int) -> Episode:
        """Return a new episode of `sample`, its own. Its course depends on `sample`, `seed` and the turns alone."""
        raise NotSupported(f"{type(self).__name__} has no episodes")

    def shutdown(self) -> None:
        """Release the environment's resources."""

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state a resumed run needs; empty if outcomes depend on the arguments alone."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state returned by `state_dict`."""


def has_episodes(environment: Environment) -> bool:
    """Whether `environment` has episodes of several turns, instead of single turns."""
    return type(environment).episode is not Environment.episode


def scores_turns(environment: Environment) -> bool:
    """Whether `environment` implements `step`, which scores single turns."""
    return type(environment).step is not Environment.step


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
        """Run the agent on `sample`, a copy for this attempt, once; return the reward that it returned, if any."""
        ...

    async def score_answer(self, sample: Sample, answer: str) -> StepOutcome:
        """Return the reward of the model's last message, for an agent that neither returned nor posted one.

        Raises `NoReward` if the environment has none for it, which costs this attempt alone.
        """
        ...


def runs_agents(environment: Environment) -> bool:
    """Whether attempts at the samples of `environment` are made by agents."""
    return isinstance(environment, RunsAgents)
