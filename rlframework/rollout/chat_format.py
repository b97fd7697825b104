"""Stand-in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlframework.datasets.rendering import render_prompt
from rlframework.interfaces.messages import Message, ToolSpec


class ChatFormat:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        return render_prompt(self._tokenizer, messages)

    def extend(
        self,
        history_ids: Sequence[int],
        messages: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        if self._tokenizer.chat_template:
            return None
        return [*history_ids, *render_prompt(self._tokenizer, new)]

    def parse(self, completion_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        return {"role": "assistant", "content": self._tokenizer.decode(completion_ids, skip_special_tokens=True)}
