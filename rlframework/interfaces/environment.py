"""The environment interface: it supplies the prompts and scores the answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from rlframework.config.sections import EnvironmentConfig

Split = Literal["train", "validation"]


class Message(TypedDict):
    """One turn of a conversation; `role` is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True)
class Sample:
    """One task: the conversation so far, the reference answer, and a completion for supervised training.

    `completion`, or `answer` if there is no completion, is a correct reply to `messages`: an environment that scores
    must give it a higher reward than a wrong reply. If correct replies need a particular form, such as tags,
    `completion` shows that form.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str
    completion: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


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


class Environment(ABC):
    """Tasks with a reward. Must be deterministic given its configuration and seed, and cheap to construct.

    `scores`: whether `step` can score answers. If False, the environment only supplies samples to train on, and
    validation uses the loss on them.
    """

    scores: bool = True

    @abstractmethod
    def __init__(self, config: EnvironmentConfig, *, seed: int) -> None:
        """Load or generate the samples. Raise `DataError` with file and line number for an unreadable file or line."""

    @abstractmethod
    def samples(self, split: Split) -> Sequence[Sample]:
        """Return the samples of a split, always in the same order. No validation sample may be in the train split."""

    @abstractmethod
    def step(self, samples: Sequence[Sample], conversations: Sequence[Sequence[Message]]) -> list[StepOutcome]:
        """Score the last assistant turn of each conversation; return one outcome per conversation, in order.

        `conversations[i]` starts with `samples[i].messages` and ends with an assistant message. Must not modify its
        arguments.
        """

    def shutdown(self) -> None:
        """Release the environment's resources."""

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state a resumed run needs; empty if outcomes depend on the arguments alone."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state returned by `state_dict`."""
