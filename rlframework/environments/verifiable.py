"""What single-turn environments with a checkable answer share.

One assistant turn, one score, over. An environment with several turns implements `Environment.step` itself: it returns
`done=False` with the next messages in `observations`; the loop that goes on from there belongs to the algorithms'
rollout.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from rlframework.errors import BatchError
from rlframework.interfaces.environment import Environment, Message, Sample, StepOutcome


class VerifiableEnvironment(Environment):
    """Judges the one answer to each sample by `score`."""

    @abstractmethod
    def score(self, sample: Sample, completion: str) -> float:
        """1.0 for a right answer, 0.0 for a wrong one, or between. Never raises, whatever the model wrote."""

    def bonus(self, sample: Sample, completion: str) -> Mapping[str, float]:
        """Further rewards by name, added to the score and reported as metrics; none by default."""
        return {}

    def step(self, samples: Sequence[Sample], conversations: Sequence[Sequence[Message]]) -> list[StepOutcome]:
        """One outcome each: `reward` is the score plus the bonuses, `metrics["accuracy"]` the score alone."""
        texts = self.answers(samples, conversations)
        return [self._judge(sample, text) for sample, text in zip(samples, texts, strict=True)]

    @staticmethod
    def answers(samples: Sequence[Sample], conversations: Sequence[Sequence[Message]]) -> list[str]:
        """The assistant's last words in each conversation; a `BatchError` where that is not what it ends with."""
        if len(samples) != len(conversations):
            raise BatchError(f"{len(samples)} samples but {len(conversations)} conversations: give one for each sample")
        for sample, conversation in zip(samples, conversations, strict=True):
            if not conversation or conversation[-1]["role"] != "assistant":
                raise BatchError(f"the conversation of sample {sample.id!r} must end with an assistant message")
        return [conversation[-1]["content"] for conversation in conversations]

    def _judge(self, sample: Sample, text: str) -> StepOutcome:
        score, bonus = self.score(sample, text), self.bonus(sample, text)
        return StepOutcome(reward=score + sum(bonus.values()), metrics={"accuracy": score, **bonus})


def prompt_messages(system_prompt: str | None, text: str) -> tuple[Message, ...]:
    """The conversation before the answer: the system prompt, where there is one, and the user's text."""
    user: Message = {"role": "user", "content": text}
    return (user,) if system_prompt is None else ({"role": "system", "content": system_prompt}, user)
