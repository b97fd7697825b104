"""Agents with a loop of their own: `environment: {name: agent, agent: "my_agent:solve", path: rows.jsonl}`."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from rlframework.base.errors import ConfigError, UserError
from rlframework.datasets.pictures import decoded
from rlframework.environments import threads
from rlframework.environments.counted_failures import AnswerScores
from rlframework.environments.dataset import DatasetEnvironment
from rlframework.environments.reward_calls import Failure, read_result
from rlframework.interfaces.environment import AgentSession, NoReward, Sample, StepOutcome
from rlframework.interfaces.messages import Message, Picture
from rlframework.plugins.user_defined import load_agent
from rlframework_serve.config import AgentConfig


def openai_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages, such as those of a `Sample`, as OpenAI's clients take them: images as data URIs.

    Raises an `ImageError` for an image that cannot be read.
    """
    return [
        {**message, "content": message["content"] if isinstance(message["content"], str) else _sent(message)}
        for message in messages
    ]


def _sent(message: Message) -> list[dict[str, Any]]:
    return [
        {"type": "image_url", "image_url": {"url": data_uri(part["image"])}} if part["type"] == "image" else {**part}
        for part in message["content"]
        if not isinstance(part, str)
    ]


def data_uri(picture: Picture) -> str:
    """Return `picture` as a data URI, its file or encoded image as it is. Raises an `ImageError` like `decoded`."""
    from PIL import Image

    if isinstance(picture.source, (Path, bytes)):
        decoded(picture)
        source = picture.encoded()
        kind = str(Image.open(BytesIO(source)).format)
    else:
        stored, kind = BytesIO(), "PNG"
        decoded(picture).save(stored, kind)
        source = stored.getvalue()
    return f"data:{Image.MIME[kind]};base64,{base64.b64encode(source).decode()}"


class AgentEnvironment(DatasetEnvironment):
    """Rows of data as tasks for an agent, a function `solve(sample, session)` of the user's, async or not.

    It returns its reward, in the forms of a reward function, or None: then the reward is the one it has posted, or
    that of `environment.check` or `environment.reward` for the model's last message.
    """

    def __init__(self, config: AgentConfig, *, seed: int) -> None:
        """Raises `ConfigError` if the function cannot be used."""
        try:
            self._agent: Callable[..., Any] = load_agent(config.agent)
        except ConfigError as error:
            raise ConfigError(f"environment.agent: {error}") from error
        self._path = config.agent
        super().__init__(config, seed=seed)
        self.counts_calls = False  # `AnswerScores` counts
        self.scores_answers = self.scores
        self._scores = AnswerScores(super().step, config.max_reward_failures)
        self.scores = True

    async def run_agent(self, sample: Sample, session: AgentSession) -> StepOutcome | None:
        """Run the agent on `sample`, in a thread if it is not async; return the reward that it returned, if any."""
        returned = await threads.call(self._agent, sample, session)
        if returned is None or isinstance(returned, StepOutcome):
            return returned
        result = read_result(returned)
        if isinstance(result, Failure):
            raise UserError(f"environment.agent={self._path!r} returned no reward: {result.text}")
        return StepOutcome(result.reward, metrics={k: v for k, v in result.metrics.items() if k != "reward_failures"})

    async def score_answer(self, sample: Sample, answer: str) -> StepOutcome:
        """Score the model's last message. Raises `NoReward` if nothing gives rewards."""
        if not self.scores_answers:
            raise NoReward(
                f"environment.agent={self._path!r} returned None and posted no reward, and neither environment.check "
                "nor environment.reward is set; return a float"
            )
        return await self._scores.score(sample, {"role": "assistant", "content": answer})

    def shutdown(self) -> None:
        """End the process of the reward function."""
        self._scores.close(super().shutdown)
