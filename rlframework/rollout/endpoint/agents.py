"""Rollouts by agents: each attempt has a session of the endpoint, whose calls become training rows.

An agent that fails (an exception, its deadline, no turn, no reward) is left out; the others go on. One that raises
because a budget has refused a turn has not failed: its attempt is truncated, like an episode at a budget.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from rlframework.config.episode_environments import AttemptsConfig
from rlframework.environments.agent import AgentSession, NoReward, RunsAgents
from rlframework.environments.threads import failing_alone
from rlframework.environments.user_tracebacks import described, traceback_of
from rlframework.errors import UserError
from rlframework.generation.driver import run_in_loop
from rlframework.generation.tasks import gather_or_cancel
from rlframework.interfaces.environment import Sample, StepOutcome
from rlframework.interfaces.generation import SamplingParams
from rlframework.observers.timeline import ENVIRONMENT, timed
from rlframework.rollout.chat_format import ChatFormat
from rlframework.rollout.endpoint.sampling import Sampler, SamplingRule
from rlframework.rollout.endpoint.server import Endpoint, served
from rlframework.rollout.endpoint.sessions import Session
from rlframework.rollout.episode_thread import Bridge, run_beside
from rlframework.rollout.episodes import report_failures
from rlframework.rollout.outcomes import require_numbers
from rlframework.rollout.result import PlayedEpisode, Rollout, rollout_of

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.algorithm import Parts

_LOG = logging.getLogger(__name__)

_GRACE = 1.0
"""Seconds that an agent has to end after its deadline, when it is cancelled."""


def play_agents(parts: Parts, samples: Sequence[Sample], seeds: Tensor, *, temperature: float | None = None) -> Rollout:
    """Have the environment's agent attempt each of `samples`, with `seeds [E]` int64; return its rows and rewards.

    The tokens depend on the seed, the weights, and the requests, in any order: see `Session.seeds`.
    Raises `UserError` if all agents have failed.
    """
    generation, config = parts.generation, parts.config.environment
    assert isinstance(config, AttemptsConfig)
    client = generation.client
    at_once = config.max_concurrent_episodes or client.limit * client.lanes
    tasks = list(zip(samples, seeds.tolist(), strict=True))

    async def play(bridge: Bridge) -> list[PlayedEpisode]:
        room = asyncio.Semaphore(at_once)
        async with agent_runner(parts, bridge) as runner:

            async def one(sample: Sample, seed: int) -> PlayedEpisode:
                async with room:
                    return await runner.play(sample, seed)

            return await gather_or_cancel([one(*task) for task in tasks])

    async def serve() -> list[PlayedEpisode]:
        ends = ChatFormat(parts.tokenizer).turn_end_ids
        async with generation.completions(temperature=temperature, stop_token_ids=ends) as completions:
            bridge = Bridge(completions, config.gather_timeout)
            client.gather = bridge.gather
            try:
                return await run_beside(partial(play, bridge), stalled_after=config.step_timeout, name=config.name)
            finally:
                client.gather = None

    generation.prepare_for_generation()
    played = run_in_loop(serve())
    generation.finish_generation()  # not after a failure, as a second error would hide the first
    report_failures(played, config)
    return rollout_of(played, int(parts.tokenizer.pad_token_id), parts.images)


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
            return await self._environment.run_agent(sample, view)

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
