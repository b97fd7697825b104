"""Sample the turns that clients ask for, and record them in their session.

The tokens of a turn are kept as they were sampled. A conversation that begins with a recorded turn is continued on its
exact tokens, although the client sends it back as messages.
"""

from __future__ import annotations

import asyncio
import bisect
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from rlframework.base.errors import DataError, RequestError
from rlframework.datasets.chat.chat_format import ChatFormat, characters_of, is_large
from rlframework.environments.tool_episodes import is_malformed, is_whole
from rlframework.interfaces.generation import GenerationResult, SamplingParams, WeightSpan
from rlframework.interfaces.messages import Message, Picture, pictures_of
from rlframework.rollout.episode_thread import Bridge, gather_or_cancel
from rlframework.rollout.result import Limit
from rlframework.rollout.seeds import turn_seed
from rlframework_serve.bodies import ApiError
from rlframework_serve.conversations import Turn
from rlframework_serve.request_bodies import TurnRequest
from rlframework_serve.sessions import Session

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlframework.datasets.image_inputs import ImageInputs

Foreign = Literal["reject", "override", "allow"]
"""The treatment of a temperature or top_p that is not the configured one."""


@dataclass(frozen=True)
class SamplingRule:
    """The sampling of all turns, and what becomes of a request for another.

    `configured`: what the run is configured with. Turns are sampled with `used`, which differs from it in validation.
    """

    configured: SamplingParams
    used: SamplingParams
    foreign: Foreign = "reject"

    def of(self, request: TurnRequest) -> SamplingParams:
        """Return the sampling of a turn. `ApiError` if the request asks for another, unless that is allowed."""
        asked = {"temperature": request.temperature, "top_p": request.top_p}
        changes: dict[str, Any] = {
            name: value for name, value in asked.items() if value not in (None, getattr(self.configured, name))
        }
        if not changes or self.foreign == "override":
            return self.used
        if self.foreign == "reject":
            raise ApiError(
                f"{', '.join(f'{name}={value:g}' for name, value in changes.items())}: the run trains on what it "
                f"samples with temperature={self.configured.temperature:g} and top_p={self.configured.top_p:g}; leave "
                "both out, or set environment.agent_sampling=override",
                code="sampling",
            )
        if changes.get("top_p") == 0.0:
            raise ApiError("top_p=0: it must be more than 0")
        sampling: SamplingParams = replace(self.used, **changes)
        return sampling


@dataclass(frozen=True, eq=False)
class Choice:
    """A sampled turn as a message, and its tokens."""

    message: Message
    result: GenerationResult
    prompt_tokens: int

    @property
    def finish_reason(self) -> str:
        """The reason in the terms of chat completions. A turn that was cut off after whole tool calls has these."""
        calls = self.message.get("tool_calls", ())
        if self.result.finish_reason != "stop" and not (calls and all(map(is_whole, calls))):
            return "length"
        return "tool_calls" if calls else "stop"


class Sampler:
    """Samples turns on `bridge`; prompts have at most `max_tokens` tokens with their completion.

    `images`: makes tokens and inputs of the model from images; None if messages have none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        bridge: Bridge,
        rule: SamplingRule,
        max_tokens: int | None = None,
        images: ImageInputs | None = None,
    ) -> None:
        self.tokenizer, self.chat = tokenizer, ChatFormat(tokenizer, images)
        self._bridge, self._rule = bridge, rule
        limits = [limit for limit in (max_tokens, bridge.positions) if limit is not None]
        self._most = min(limits, default=None)

    def check(self, request: TurnRequest) -> None:
        """Raise `ApiError` for a sampling that is not served."""
        self._rule.of(request)

    async def sample(self, session: Session, request: TurnRequest) -> list[Choice]:
        """Return the choices of a turn, and record them if the session does."""
        sampling, known = self._rule.of(request), session.conversations.find(request.messages, request.tools)
        self.require_short(session, request.messages)
        pictures = pictures_of(request.messages)
        work = partial(self._inputs, request, known, pictures)
        large = is_large(request.messages, request.tools)
        ids, known, media = await asyncio.to_thread(work) if large else work()
        room = self._room(session, request, len(ids))
        session.begin_turns(request.choices)
        seeds = session.seeds(ids, request.choices, pictures) or _own_seeds(request)
        name = session.engine_session_of(request)
        results = await self._results(
            [self._bridge.complete(ids, seed, room, name, sampling, media=media) for seed in seeds]
        )
        choices = [self._choice(session, request, ids, result, known) for result in results]
        if session.engine_sessions is not None:
            for choice in choices:
                session.engine_sessions.answered(request.messages, request.tools, choice.message, name)
        return choices

    async def complete(
        self, session: Session, request: TurnRequest, text: str, ids: Tensor
    ) -> list[tuple[GenerationResult, str]]:
        """Return completions of a prompt without a template, each with its text, and record them if the session does.

        Both end at the request's stops. The turns have been begun. `text`: the prompt's, for the transcript.
        """
        sampling, room = self._rule.of(request), self._room(session, request, len(ids))
        seeds, name = session.seeds(ids, request.choices) or _own_seeds(request), session.engine_session_of(request)
        results = await self._results([self._bridge.complete(ids, seed, room, name, sampling) for seed in seeds])
        found = []
        for result in results:
            cut = self._cut(result, request.stop)
            decoded = str(self.tokenizer.decode(cut.token_ids.tolist(), skip_special_tokens=True))
            completed = decoded[: _first(decoded, request.stop)]
            if session.record:
                if cut.finish_reason != "stop":
                    session.limit = self._limit(request, len(ids))
                session.add_completion(text, completed, session.trajectory.add(ids, cut))
            found.append((cut, completed))
        return found

    async def _results(self, work: Sequence[Coroutine[Any, Any, GenerationResult]]) -> list[GenerationResult]:
        """Return the results of all; `ApiError` for a request that the engines reject."""
        try:
            return await gather_or_cancel(work)
        except RequestError as error:
            raise ApiError(str(error)) from error

    def _inputs(
        self, request: TurnRequest, known: Turn | None, pictures: Sequence[Picture]
    ) -> tuple[Tensor, Turn | None, Mapping[str, Tensor]]:
        """Return the tokens of `_prompt` with their turn, and the model's inputs for the images."""
        prompt, known = self._prompt(request, known)
        return torch.tensor(prompt), known, self.chat.media(pictures)

    def _prompt(self, request: TurnRequest, known: Turn | None) -> tuple[list[int], Turn | None]:
        """Return the prompt's tokens, and the turn whose tokens they begin with: `known`, if it can be continued."""
        try:
            if known is not None and (new := request.messages[len(known.messages) :]):
                extended = self.chat.extend(known.all_ids(), known.messages, new, request.tools)
                if extended is not None:
                    return extended, known
            return self.chat.prompt(request.messages, request.tools), None
        except DataError as error:
            raise ApiError(str(error)) from error

    def require_short(self, session: Session, messages: Sequence[Message]) -> None:
        """Raise `ApiError` if a prompt has too many characters to fit, before they are made tokens."""
        if self._most is not None and self.chat.is_longer(messages, self._most):
            raise session.refused(
                f"the conversation has {characters_of(messages):,} characters, too many for a turn: the most "
                f"is {self._most} tokens (environment.max_episode_tokens, or the model's positions)",
                code="context_length_exceeded",
                limit="max_episode_tokens",
            )

    def _room(self, session: Session, request: TurnRequest, used: int) -> int:
        room = self._bridge.max_new_tokens if request.max_tokens is None else request.max_tokens
        room = min(room, self._bridge.max_new_tokens)
        if self._most is None:
            return room
        if used >= self._most:
            raise session.refused(
                f"the conversation has {used} tokens, which leaves no room for a turn: the most is {self._most} "
                "(environment.max_episode_tokens, or the model's positions)",
                code="context_length_exceeded",
                limit="max_episode_tokens",
            )
        return min(room, self._most - used)

    def _limit(self, request: TurnRequest, used: int) -> Limit:
        """Return what has cut a turn after `used` tokens: the tightest of the limits that `_room` applies."""
        own = self._bridge.max_new_tokens
        asked = own if request.max_tokens is None else request.max_tokens
        if self._most is not None and self._most - used < min(own, asked):
            return "max_episode_tokens"
        return "agent_request" if asked < own else "max_new_tokens"

    def _choice(
        self, session: Session, request: TurnRequest, prompt: Tensor, result: GenerationResult, known: Turn | None
    ) -> Choice:
        whole, result = result, self._cut(result, request.stop)
        ids: list[int] = result.token_ids.tolist()
        message = self.chat.parse(ids, request.tools, position=len(request.messages))
        if result is not whole:
            text = str(message["content"])
            message = {**message, "content": text[: _first(text, request.stop)]}
        if session.record:
            calls = message.get("tool_calls", ())
            session.calls += len(calls)
            session.malformed += sum(is_malformed(call, request.tools) for call in calls)
            if result.finish_reason != "stop":
                session.limit = self._limit(request, len(prompt))
            row = session.trajectory.add(prompt, result, pictures_of(request.messages))
            begin = 0 if known is None else known.length
            session.add_turn(request, message, known, torch.cat((prompt[begin:], result.token_ids)), row)
        return Choice(message, result, len(prompt))

    def _cut(self, result: GenerationResult, stops: Sequence[str]) -> GenerationResult:
        """Return the fewest tokens of `result` whose text has one of `stops`; `result` itself if it has none."""
        ids: Any = result.token_ids.tolist()

        def stopped(count: int) -> bool:
            text = str(self.tokenizer.decode(ids[:count], skip_special_tokens=True))
            return any(stop in text for stop in stops)

        if not stops or not stopped(len(ids)):
            return result
        end = bisect.bisect_left(range(len(ids)), True, key=lambda index: stopped(index + 1)) + 1
        spans = tuple(WeightSpan(s, min(e, end), version) for s, e, version in result.spans if s < end)
        return replace(
            result, token_ids=result.token_ids[:end], logprobs=result.logprobs[:end], finish_reason="stop", spans=spans
        )


def _own_seeds(request: TurnRequest) -> list[int]:
    """The seeds of a request whose client chooses them; without a choice, random ones."""
    seed = secrets.randbits(62) if request.seed is None else request.seed % 2**62  # negative ones are allowed
    return [turn_seed(seed, number) for number in range(request.choices)]


def _first(text: str, stops: Sequence[str]) -> int:
    """The position of the first of `stops` in `text`, or its end."""
    return min((found for stop in stops if (found := text.find(stop)) >= 0), default=len(text))
