"""The environment interface: where prompts come from, and what an answer is worth."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from rlframework.config.sections import EnvironmentConfig

Split = Literal["train", "validation"]


class Message(TypedDict):
    """One turn of a conversation: `role` is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True)
class Sample:
    """One task: the conversation so far, the answer to check against, and a completion for supervised training.

    `completion`, or `answer` where there is no completion, is a right reply to `messages`: an environment that scores
    gives it more than a wrong one. Where a right reply has a form of its own, such as tags, `completion` shows it.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str
    completion: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepOutcome:
    """What the environment says to one conversation: the turn's reward, whether it is over, what comes next."""

    reward: float
    done: bool = True
    observations: tuple[Message, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(ABC):
    """Tasks with a reward. Deterministic in its configuration and seed; light to construct.

    `scores`: whether `step` can judge answers. Where it is False there are only samples to train on, and validation is
    by their loss.
    """

    scores: bool = True

    @abstractmethod
    def __init__(self, config: EnvironmentConfig, *, seed: int) -> None:
        """Read or make the samples. An unreadable file or a bad line is a `DataError` naming file and line number."""

    @abstractmethod
    def samples(self, split: Split) -> Sequence[Sample]:
        """The samples of a split, always in the same order; no sample of validation is in train."""

    @abstractmethod
    def step(self, samples: Sequence[Sample], conversations: Sequence[Sequence[Message]]) -> list[StepOutcome]:
        """Judge the last assistant turn of each conversation (batched: one outcome for each, in order).

        `conversations[i]` starts with `samples[i].messages` and ends with an assistant message. Arguments are never
        changed.
        """

    def shutdown(self) -> None:
        """Free what the environment holds."""

    def state_dict(self) -> dict[str, Any]:
        """What a run that was stopped goes on from, as JSON; empty where outcomes depend on their arguments alone."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
