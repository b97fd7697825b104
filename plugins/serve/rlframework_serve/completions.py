"""Completions of text and of token ids, without a chat template: their requests, what answers them, and replies."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from rlframework.interfaces.generation import GenerationResult
from rlframework.rollout.episode_thread import gather_or_cancel
from rlframework_serve.bodies import ApiError
from rlframework_serve.chat import Reply
from rlframework_serve.prompt_logprobs import PromptScorer, TokenScores, token_ids_of
from rlframework_serve.request_bodies import (
    IGNORED,
    TurnRequest,
    integer,
    reject_unknown,
    require_plain_sampling,
    turn_request,
)
from rlframework_serve.sampling import Sampler
from rlframework_serve.sessions import Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_COMPLETIONS = 1024
"""The most completions of one request: its prompts times `n`."""

_DEFAULT_TOKENS = 16
"""OpenAI's `max_tokens` of a request without one."""

_MOST_TOP = 20

_KEYS = IGNORED | {
    "prompt", "echo", "logprobs", "n", "seed", "max_tokens", "temperature", "top_p", "stop", "frequency_penalty",
    "presence_penalty", "logit_bias",
}  # fmt: skip


@dataclass(frozen=True)
class CompletionRequest:
    """The completions that a client asks for: `turn.choices` of each of `prompts`, texts or token ids.

    `echo`: whether the prompt comes with its completions. `logprobs`: how many most likely tokens come with each token;
    None: no log-probabilities.
    """

    prompts: Sequence[str | list[int]]
    turn: TurnRequest
    echo: bool
    logprobs: int | None

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are asked for that are not known from sampling."""
        return self.logprobs is not None and (self.echo or self.logprobs > 0)


@dataclass(frozen=True, eq=False)
class Completion:
    """A completion of a prompt: its tokens in `result`, None if none were asked for, and its text up to a stop.

    `scores`: log-probabilities of all tokens, those of the prompt first; None if they were not asked for.
    """

    prompt: str
    prompt_ids: list[int]
    result: GenerationResult | None
    text: str
    scores: TokenScores | None = None

    @property
    def ids(self) -> list[int]:
        """The tokens after the prompt."""
        return [] if self.result is None else list(self.result.token_ids.tolist())


def completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the completions that a body asks for. Raises `ApiError` for what is not served."""
    reject_unknown(body, _KEYS)
    require_plain_sampling(body)
    echo, prompts, limit = body.get("echo"), _prompts(body.get("prompt")), integer(body, "max_tokens", 0, 2**31)
    if echo not in (None, True, False):
        raise ApiError(f"echo={echo!r:.80} must be true or false")
    if limit == 0 and not echo:
        raise ApiError("max_tokens=0 generates nothing; it needs echo=true, which returns the prompt")
    turn = turn_request(body, (), (), _DEFAULT_TOKENS if limit is None else limit)
    if (count := len(prompts) * turn.choices) > MOST_COMPLETIONS:
        raise ApiError(f"{len(prompts)} prompts times n={turn.choices} are {count}; the most is {MOST_COMPLETIONS}")
    return CompletionRequest(prompts, turn, bool(echo), integer(body, "logprobs", 0, _MOST_TOP))


class Completer:
    """Answers completions: samples with `sampler`, and scores with `scorer`, if there is one."""

    def __init__(self, sampler: Sampler, scorer: PromptScorer | None) -> None:
        self._sampler, self._scorer = sampler, scorer

    def check(self, request: CompletionRequest) -> None:
        """Raise `ApiError` for a sampling or log-probabilities that are not served."""
        self._sampler.check(request.turn)
        if request.scored and self._scorer is None:
            raise ApiError(
                "logprobs with echo, or above 0, are served by `rlframework serve` with worker_group.name=inline only; "
                "give logprobs=0 without echo, or leave it out"
            )

    async def complete(self, session: Session, request: CompletionRequest) -> list[Completion]:
        """Return the completions of all prompts, in order, and record them if the session does."""
        prompts = await asyncio.to_thread(self._tokenized, session, request.prompts)
        if request.turn.max_tokens:
            session.begin_turns(len(prompts) * request.turn.choices)
        of_prompts = await gather_or_cancel([self._of_prompt(session, request, *prompt) for prompt in prompts])
        return [completion for completions in of_prompts for completion in completions]

    async def _of_prompt(
        self, session: Session, request: CompletionRequest, text: str, ids: list[int]
    ) -> list[Completion]:
        count, found = request.turn.choices, [Completion(text, ids, None, "")]
        if request.turn.max_tokens:
            results = await self._sampler.complete(session, request.turn, text, torch.tensor(ids))
            found = [Completion(text, ids, result, completed) for result, completed in results]
        if request.scored and self._scorer is not None:
            top = request.logprobs or 0
            found = [
                Completion(text, ids, one.result, one.text, await self._scorer.score([*ids, *one.ids], top))
                for one in found
            ]
        return found if request.turn.max_tokens else found * count

    def _tokenized(self, session: Session, prompts: Sequence[str | list[int]]) -> list[tuple[str, list[int]]]:
        """Return the text and the tokens of each prompt. `ApiError` for one without tokens, or with too many."""
        found = []
        for place, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                self._sampler.require_short(session, [{"role": "user", "content": prompt}])
                text, ids = prompt, list(self._sampler.tokenizer(prompt)["input_ids"])
            else:
                text, ids = str(self._sampler.tokenizer.decode(prompt)), prompt
            if not ids:
                raise ApiError(f"prompt {place} has no tokens; give at least one")
            found.append((text, ids))
        return found


def _prompts(given: Any) -> Sequence[str | list[int]]:
    """Return the prompts of a request: a text, texts, token ids, or lists of token ids."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given and all(isinstance(one, str) for one in given):
        return given
    if isinstance(given, list) and given and all(isinstance(one, list) for one in given):
        return [token_ids_of(one) for one in given]
    return [token_ids_of(given)]


class CompletionReply(Reply[Completion]):
    """One reply to `request`, whose `id` and time are set when it is accepted."""

    def __init__(self, request: CompletionRequest, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Completion]) -> dict[str, Any]:
        """Return the reply as one object."""
        found = [self._choice(number, choice) for number, choice in enumerate(choices)]
        prompts = sum(len(choice.prompt_ids) for choice in choices[:: self._request.turn.choices])
        sampled = sum(len(choice.ids) for choice in choices)
        usage = {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}
        return {**self._head, "choices": found, "usage": usage}

    def events(self, choices: Sequence[Completion]) -> Iterator[str]:
        """Return the events of completions: each as a whole, because the engine returns it when it is complete."""
        reply = self.whole(choices)
        for choice in reply["choices"]:
            yield f"data: {json.dumps({**self._head, 'choices': [choice]})}\n\n"
        yield f"data: {json.dumps({**self._head, 'choices': [], 'usage': reply['usage']})}\n\n"
        yield "data: [DONE]\n\n"

    def _choice(self, number: int, choice: Completion) -> dict[str, Any]:
        stopped = choice.result is not None and choice.result.finish_reason == "stop"
        return {
            "index": number,
            "text": f"{choice.prompt}{choice.text}" if self._request.echo else choice.text,
            "logprobs": None if self._request.logprobs is None else self._logprobs(choice),
            "finish_reason": "stop" if stopped else "length",
        }

    def _logprobs(self, choice: Completion) -> dict[str, Any]:
        """Return OpenAI's lists by token. Tokens with the same text share an entry: that of the most likely."""
        ids, scores = choice.ids, choice.scores
        if scores is None:
            sampled = [] if choice.result is None else choice.result.logprobs.tolist()
            scores = [{token: value} for token, value in zip(ids, sampled, strict=True)]
        elif self._request.echo:
            ids = [*choice.prompt_ids, *ids]
        else:
            scores = scores[len(choice.prompt_ids) :]
        distinct = sorted({*ids, *(token for by_id in scores for token in by_id or ())})
        decoded = self._tokenizer.batch_decode([[token] for token in distinct])
        texts = dict(zip(distinct, decoded, strict=True))
        tokens = [texts[token] for token in ids]
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if by_id is None else by_id[token] for token, by_id in zip(ids, scores, strict=True)
            ],
            "top_logprobs": [None if by_id is None else _by_text(by_id, texts) for by_id in scores],
            "text_offset": list(accumulate(map(len, tokens), initial=0))[:-1],
        }


def _by_text(by_id: Mapping[int, float], texts: Mapping[int, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, value in by_id.items():
        found[texts[token]] = max(value, found.get(texts[token], value))
    return found
