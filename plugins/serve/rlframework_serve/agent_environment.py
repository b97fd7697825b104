"""Agents with a loop of their own: `environment: {name: agent, agent: "my_agent:solve", path: rows.jsonl}`.

Each attempt has a session of the endpoint, whose calls become training rows. An agent that fails (an exception, its
deadline, no turn, no reward) is left out; the others go on. One that raises because a budget has refused a turn has not
failed: its attempt is truncated, like an episode at a budget.
"""

from __future__ import annotations

import asyncio
import base64
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlframework.base.errors import ConfigError, UserError
from rlframework.base.logs import plugin_logger
from rlframework.config.environments import AttemptsConfig
from rlframework.datasets.pictures import decoded
from rlframework.environments import threads
from rlframework.environments.counted_failures import AnswerScores
from rlframework.environments.dataset import DatasetEnvironment
from rlframework.environments.reward_calls import Failure, read_result
from rlframework.environments.threads import failing_alone
from rlframework.environments.user_tracebacks import described, traceback_of
from rlframework.interfaces.environment import AgentSession, NoReward, RunsAgents, Sample, StepOutcome
from rlframework.interfaces.generation import SamplingParams
from rlframework.interfaces.messages import Message, Picture
from rlframework.observers.timeline import ENVIRONMENT, timed
from rlframework.plugins.user_defined import load_agent
from rlframework.rollout.episode_thread import Bridge
from rlframework.rollout.outcomes import require_numbers
from rlframework.rollout.result import PlayedEpisode
from rlframework_serve.plugin import AgentConfig
from rlframework_serve.sampling import Sampler, SamplingRule
from rlframework_serve.server import Endpoint, served
from rlframework_serve.sessions import Session

if TYPE_CHECKING:
    from rlframework.rollout.parts import Parts

_LOG = plugin_logger(__name__)

_GRACE = 1.0
"""Seconds that an agent has to end after its deadline, when it is cancelled."""


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


@asynccontextmanager
async def agent_runner(parts: Parts, bridge: Bridge) -> AsyncIterator[AgentRunner]:
    """Context with the runner of the environment's agents, whose endpoint samples on `bridge`."""
    run, config = parts.generation.config, parts.config.environment
    assert isinstance(config, AttemptsConfig)
    configured = SamplingParams(run.temperature, run.top_k, run.top_p)
    rule = SamplingRule(configured, bridge.sampling, config.agent_sampling)
    sampler = Sampler(parts.tokenizer, bridge, rule, config.max_episode_tokens, parts.images)
    endpoint = Endpoint(sampler, "policy", images=config.images)
    async with served(endpoint) as base_url:
        try:
            yield AgentRunner(cast("RunsAgents", parts.environment), config, endpoint, bridge, base_url)
        finally:
            await _close_what_agents_left()


async def _close_what_agents_left() -> None:
    """Close the asynchronous clients that agents have left open, as long as their event loop is there.

    Such a client is closed when it is collected, by a task in whichever loop is running; in another than its own that
    fails with a traceback.
    """
    known = asyncio.all_tasks()
    gc.collect()
    if closing := asyncio.all_tasks() - known:
        await asyncio.wait(closing, timeout=_GRACE)


class AgentRunner:
    """Runs the agent of `environment` against `endpoint`, which is served at `base_url`."""

    def __init__(
        self, environment: RunsAgents, config: AttemptsConfig, endpoint: Endpoint, bridge: Bridge, base_url: str
    ) -> None:
        self._environment, self._config, self._endpoint = environment, config, endpoint
        self._bridge, self._base_url = bridge, base_url
        self._warned = False

    async def play(self, sample: Sample, seed: int) -> PlayedEpisode:
        """Run the agent on `sample` once, with a session of its own, which is closed at its end.

        Raises what an engine has failed with meanwhile, whatever the agent has made of it.
        """
        session = Session(self._bridge.begin(), seed, max_turns=self._config.max_turns, timeline=self._bridge.timeline)
        self._endpoint.sessions.open(session)
        try:
            end = await self._run(sample, session)
        finally:
            self._endpoint.sessions.close(session)
            self._bridge.end(session.engine_session)
        if session.engine_error is not None:
            raise session.engine_error
        if end.raised and session.refusal and session.trajectory.turns:
            return _episode(sample, session, await self._at_budget(sample, session))
        if not end.failure and not session.trajectory.turns:
            end = _End("the agent ended without a call of the endpoint, so there is no token to train on")
        if not end.failure:
            end = await self._rewarded(sample, session, end.outcome)
        return _episode(sample, session, end)

    async def _run(self, sample: Sample, session: Session) -> _End:
        """Run the agent to its end or deadline; return why it failed, or the reward that it returned, if any."""
        seconds = self._config.agent_timeout
        view = AgentSession(self._base_url, session.token, self._endpoint.model, session.id)
        session.begin_own_time()
        task = asyncio.ensure_future(self._run_alone(sample, view))
        try:
            await asyncio.wait({task}, timeout=seconds)
        except asyncio.CancelledError:
            self._endpoint.sessions.close(session, given_up=True)
            raise
        finally:
            in_time = task.done()
            session.end_own_time()
            if not in_time:
                self._endpoint.sessions.close(session)
                task.cancel()
                await asyncio.wait({task}, timeout=_GRACE)
        if task.done() and not task.cancelled() and (raised := task.exception()) is not None and in_time:
            return _End(described(raised, "the agent"), traceback_of(raised), raised=True)
        if not in_time:
            refused = f"; the endpoint had refused its last request: {session.refusal}" if session.refusal else ""
            return _End(f"the agent took more than environment.agent_timeout={seconds:g} seconds{refused}")
        return _End("the agent was cancelled") if task.cancelled() else _End(outcome=task.result())

    async def _run_alone(self, sample: Sample, view: AgentSession) -> StepOutcome | None:
        with failing_alone():
            return await self._environment.run_agent(sample.copy(), view)

    async def _at_budget(self, sample: Sample, session: Session) -> _End:
        """Return the reward of an agent that raised when a budget refused a turn: as for episodes, what it has by then.

        That is the posted reward, or the environment's for the model's last message; 0 without either.
        """
        outcome = (await self._rewarded(sample, session, None)).outcome or StepOutcome(0.0)
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "the agent raised when a turn was refused, so that its attempt at sample %r counts as truncated, with "
                "the reward %g: %s. Others in this rollout are not logged", sample.id, outcome.reward, session.refusal,
            )  # fmt: skip
        return _End(outcome=outcome)

    async def _rewarded(self, sample: Sample, session: Session, outcome: StepOutcome | None) -> _End:
        """Return the returned reward, the posted one, or the environment's for the model's last message."""
        if outcome is None and session.reward is not None:
            outcome = StepOutcome(session.reward, metrics=session.metrics)
        if outcome is None:
            try:
                with timed(self._bridge.timeline, ENVIRONMENT, "score"):
                    outcome = await self._environment.score_answer(sample, session.completion)
            except NoReward as error:
                return _End(str(error))
        try:
            require_numbers([outcome], [sample], self._config.name)
        except UserError as error:
            return _End(str(error))
        return _End(outcome=outcome)


@dataclass(frozen=True)
class _End:
    """The end of an attempt: its outcome, or why it failed, with the traceback if the agent has `raised`."""

    failure: str = ""
    traceback: str = ""
    outcome: StepOutcome | None = None
    raised: bool = False


def _episode(sample: Sample, session: Session, end: _End) -> PlayedEpisode:
    transcript, outcome = session.transcript, end.outcome
    if outcome is not None and (last := next((turn for turn in reversed(transcript) if turn["trained"]), None)):
        last["reward"] = float(outcome.reward)
    trajectory = session.trajectory
    return PlayedEpisode(
        sample, trajectory.rows, transcript, [outcome] if outcome is not None else [], trajectory.turns,
        trajectory.breaks, session.calls, session.malformed, session.limit, end.failure, session.completion,
        end.traceback,
    )  # fmt: skip
