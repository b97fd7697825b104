"""Base class of single-turn environments with a checkable answer.

An episode is one assistant turn and one score. An environment with several turns implements `Environment.step` itself:
it returns `done=False` with the next messages in `observations`, and the rollout continues the episode.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from rlframework.base.errors import BatchError
from rlframework.interfaces.environment import Environment, Sample, StepOutcome
from rlframework.interfaces.messages import Message, text_of


class VerifiableEnvironment(Environment):
    """Scores the answer to each sample with `score`."""

    @abstractmethod
    def score(self, sample: Sample, completion: str) -> float:
        """Return 1.0 for a right answer, 0.0 for a wrong one, or a value between. Must not raise for any completion."""

    def bonus(self, sample: Sample, completion: str) -> Mapping[str, float]:
        """Return further rewards by name, which are added to the score and reported as metrics. Default: none."""
        return {}

    def step(self, samples: Sequence[Sample], conversations: Sequence[Sequence[Message]]) -> list[StepOutcome]:
        """Return one outcome per sample: `reward` is score plus bonuses, `metrics["accuracy"]` the score alone."""
        outcomes = []
        for sample, text in zip(samples, self.answers(samples, conversations), strict=True):
            score, bonus = self.score(sample, text), self.bonus(sample, text)
            outcomes.append(StepOutcome(score + sum(bonus.values()), metrics={"accuracy": score, **bonus}))
        return outcomes

    @staticmethod
    def answers(samples: Sequence[Sample], conversations: Sequence[Sequence[Message]]) -> list[str]:
        """Return the last message of each conversation; a `BatchError` unless it is the assistant's."""
        for sample, conversation in zip(samples, conversations, strict=True):
            if not conversation or conversation[-1]["role"] != "assistant":
                raise BatchError(f"the conversation of sample {sample.id!r} must end with an assistant message")
        return [text_of(conversation[-1]) for conversation in conversations]


def prompt_messages(system_prompt: str | None, text: str) -> tuple[Message, ...]:
    """The messages before the answer: the system prompt, if any, and the user message `text`."""
    user: Message = {"role": "user", "content": text}
    return (user,) if system_prompt is None else ({"role": "system", "content": system_prompt}, user)
