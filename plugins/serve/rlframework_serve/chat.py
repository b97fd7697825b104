"""The interface of replies of each API, and those of chat completions: as JSON, and as server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlframework_serve.request_bodies import includes_usage
from rlframework_serve.sampling import Choice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

C_contra = TypeVar("C_contra", contravariant=True)


class Reply(Protocol[C_contra]):
    """A reply that is sent as one object or as events, made from what was sampled."""

    def whole(self, choices: Sequence[C_contra]) -> dict[str, Any]:
        """Return the reply as one object."""
        ...

    def begin(self) -> Iterator[str]:
        """Return the events before anything is sampled; by default none."""
        return iter(())

    def events(self, choices: Sequence[C_contra]) -> Iterator[str]:
        """Return the events of what was sampled."""
        ...

    def failure(self, error: Mapping[str, Any]) -> Iterator[str]:
        """Return the events of a request that could not be answered; by default one."""
        yield f"data: {json.dumps(error)}\n\n"


class ChatReply(Reply[Choice]):
    """One reply, whose `id` and time are set when the request is accepted. `body`: the request."""

    def __init__(self, body: Mapping[str, Any], model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._logprobs = tokenizer, bool(body.get("logprobs"))
        self._usage = includes_usage(body)
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the reply as one object."""
        found = [
            {
                "index": number,
                "message": _message(choice),
                "finish_reason": choice.finish_reason,
                "logprobs": self._logprobs_of(choice),
            }
            for number, choice in enumerate(choices)
        ]
        return {**self._head, "object": "chat.completion", "choices": found, "usage": usage(choices)}

    def begin(self) -> Iterator[str]:
        """Return the events before anything is sampled."""
        yield self._chunk([_delta(0, {"role": "assistant", "content": ""})])

    def events(self, choices: Sequence[Choice]) -> Iterator[str]:
        """Return the events of sampled turns: each as a whole, because the engine returns it when it is complete."""
        for number, choice in enumerate(choices):
            message = _message(choice)
            calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
            sent = {**message, **({"tool_calls": calls} if calls else {})}
            yield self._chunk([_delta(number, sent, logprobs=self._logprobs_of(choice))])
            yield self._chunk([_delta(number, {}, choice.finish_reason)])
        if self._usage:
            yield self._chunk([], usage(choices))
        yield "data: [DONE]\n\n"

    def _chunk(self, choices: list[dict[str, Any]], used: dict[str, int] | None = None) -> str:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices, "usage": used}
        return f"data: {json.dumps(chunk)}\n\n"

    def _logprobs_of(self, choice: Choice) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        ids, values = choice.result.token_ids.tolist(), choice.result.logprobs.tolist()
        tokens = [str(self._tokenizer.decode([number])) for number in ids]
        rows = [
            {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
            for token, value in zip(tokens, values, strict=True)
        ]
        return {"content": rows, "refusal": None}


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Return the tokens of the prompt and of all choices."""
    prompt, sampled = choices[0].prompt_tokens, sum(len(choice.result.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {**choice.message}
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    return message


def _delta(
    number: int, delta: Mapping[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": number, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
