"""Replies to completions, as JSON and as server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rlframework_serve.completions import Completion, CompletionRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CompletionReply:
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

    def begin(self) -> Iterator[str]:
        """Return the events before anything is sampled: none."""
        return iter(())

    def events(self, choices: Sequence[Completion]) -> Iterator[str]:
        """Return the events of completions: each as a whole, because the engine returns it when it is complete."""
        reply = self.whole(choices)
        for choice in reply["choices"]:
            yield f"data: {json.dumps({**self._head, 'choices': [choice]})}\n\n"
        yield f"data: {json.dumps({**self._head, 'choices': [], 'usage': reply['usage']})}\n\n"
        yield "data: [DONE]\n\n"

    def failure(self, error: Mapping[str, Any]) -> Iterator[str]:
        """Return the events of completions that could not be sampled."""
        yield f"data: {json.dumps(error)}\n\n"

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
