"""Completions that only score their prompt: log-probabilities of given tokens, by token id, for a distillation.

The fields are vLLM's: `prompt` as token ids, `prompt_logprobs`, and `max_tokens` of 0 or 1, since nothing is generated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlframework.base.errors import BatchError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework_serve.bodies import ApiError
from rlframework_serve.request_bodies import integer, number, reject_unknown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.policy.client import Policy

MOST_TOP = 1024
"""The largest `prompt_logprobs` of a request."""

_END = 2**31
"""Beyond all token ids; which of them the model has is checked with the batch."""

_KEYS = frozenset({"model", "prompt", "max_tokens", "prompt_logprobs", "temperature", "user"})


TokenScores = Sequence[dict[int, float] | None]
"""Log-probabilities by token id at each position of a sequence: of its own token and the most likely; first None."""


class PromptScorer:
    """Scores prompts with a policy of the driver's process, in the event loop `loop` of the driver."""

    def __init__(self, policy: Policy, tokenizer: PreTrainedTokenizerBase, loop: asyncio.AbstractEventLoop) -> None:
        self._policy, self._tokenizer, self._loop = policy, tokenizer, loop

    async def answer(self, body: Mapping[str, Any], model: str) -> dict[str, Any]:
        """Return the answer to the body of a completion; called in any thread. Raises `ApiError`."""
        reject_unknown(body, _KEYS)
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


def token_ids_of(given: Any) -> list[int]:
    """Return a prompt of token ids. `ApiError` for anything else."""
    if not isinstance(given, list) or not given or not all(type(token) is int and 0 <= token < _END for token in given):
        raise ApiError(
            f"prompt must be a list of token ids, integers from 0 to {_END - 1}, or without prompt_logprobs a text; or "
            "a list of either"
        )
    return given
