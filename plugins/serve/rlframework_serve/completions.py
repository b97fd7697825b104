"""Completions of text and of token ids, without a chat template: what samples or only scores them, and replies.

A completion that only scores its prompt, for a distillation, has log-probabilities of given tokens by token id. The
fields are vLLM's: `prompt` as token ids, `prompt_logprobs`, and `max_tokens` of 0 or 1, since nothing is generated.
"""

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

from rlframework.base.errors import BatchError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.generation import GenerationResult
from rlframework.rollout.episode_thread import gather_or_cancel
from rlframework_serve.bodies import ApiError
from rlframework_serve.chat import Reply
from rlframework_serve.request_bodies import CompletionRequest, integer, number, reject_unknown, token_ids_of
from rlframework_serve.sampling import Sampler
from rlframework_serve.sessions import Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.policy.client import Policy

MOST_TOP = 1024
"""The largest `prompt_logprobs` of a request."""

_SCORING_KEYS = frozenset({"model", "prompt", "max_tokens", "prompt_logprobs", "temperature", "user"})

TokenScores = Sequence[dict[int, float] | None]
"""Log-probabilities by token id at each position of a sequence: of its own token and the most likely; first None."""


class PromptScorer:
    """Scores prompts with a policy of the driver's process, in the event loop `loop` of the driver."""

    def __init__(self, policy: Policy, tokenizer: PreTrainedTokenizerBase, loop: asyncio.AbstractEventLoop) -> None:
        self._policy, self._tokenizer, self._loop = policy, tokenizer, loop

    async def answer(self, body: Mapping[str, Any], model: str) -> dict[str, Any]:
        """Return the answer to the body of a completion; called in any thread. Raises `ApiError`."""
        reject_unknown(body, _SCORING_KEYS)
        ids, top = token_ids_of(body.get("prompt")), integer(body, "prompt_logprobs", 0, MOST_TOP) or 0
        if (integer(body, "max_tokens", 0, 2**31) or 0) > 1:
            raise ApiError(f"max_tokens={body['max_tokens']}, but nothing is generated; it must be 0, 1 or left out")
        number(body, "temperature", 0, 100)  # of sampling, which does not change the log-probabilities of a prompt
        found = [None if by_id is None else self._entries(by_id) for by_id in await self.score(ids, top)]
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "prompt_logprobs": found}
        usage = {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}
        head = {"id": f"cmpl-{time.time_ns():x}", "object": "text_completion", "created": int(time.time())}
        return {**head, "model": model, "choices": [choice], "usage": usage}

    def _entries(self, by_id: Mapping[int, float]) -> dict[str, Any]:
        return {
            str(token): {"logprob": value, "decoded_token": self._tokenizer.decode([token])}
            for token, value in by_id.items()
        }

    async def score(self, ids: Sequence[int], top: int) -> TokenScores:
        """Return log-probabilities of `ids` and of the `top` most likely tokens at each; called in any thread."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._score(ids, top), self._loop))

    async def _score(self, ids: Sequence[int], top: int) -> TokenScores:
        data: BatchedDataDict[Any] = BatchedDataDict(
            {"input_ids": torch.tensor([ids]), "input_lengths": torch.tensor([len(ids)])}
        )
        temperature = self._policy.config.generation.temperature or 1.0
        if temperature != 1.0:
            raise ApiError(f"the model is served at temperature {temperature:g}; prompt_logprobs need 1", status=409)
        try:
            own = self._policy.get_logprobs(data)["logprobs"][0].tolist()
            best: Any = self._policy.get_topk_logits(data, top) if top else None
        except BatchError as error:
            raise ApiError(str(error)) from error
        found: list[dict[int, float] | None] = [None]
        for place in range(1, len(ids)):
            by_id = {ids[place]: own[place]}
            if best is not None:
                logprobs = best["topk_logits"][0, place] - best["topk_normalizers"][0, place]
                by_id |= dict(zip(best["topk_indices"][0, place].tolist(), logprobs.tolist(), strict=True))
            found.append(by_id)
        return found


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
        if self._request.usage:
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
