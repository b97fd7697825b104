"""Conversations as the text of a chat template and as tokens, in which special tokens come from the template alone.

A tool's result or a user's text may spell a special token, such as `<|im_end|>`. Tokenised as it stands, it would end
the turn and could start one in another role. So such spellings are marked before the template is rendered, and the text
is tokenised in two parts there: none of the two is the special token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlframework.errors import DataError
from rlframework.interfaces.messages import Message, ToolCall, ToolSpec, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\ue002"
"""Inserted after the first character of a spelled special token. Anywhere else it is ordinary text."""


_PROBE = "probe0call"
_PROBE_CALL: ToolCall = {
    "id": "probe0000",
    "type": "function",
    "function": {"name": "f", "arguments": f'{{"a": "{_PROBE}"}}'},
}


class ChatText:
    """Renders and tokenises conversations for `tokenizer`; without a chat template, contents are concatenated."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self.template: str | None = template if template is None or isinstance(template, str) else str(template)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, prompt: bool = False) -> str:
        """Return the text of `messages`, with spelled special tokens marked; `prompt`: the model answers next.

        A template that knows no tools gets them as text: in the system message, with calls in the Hermes format and
        results as user messages.
        """
        if not self._knows_tools:
            messages, tools = _as_text(messages, tools), ()
        safe = [self._safe(message) for message in messages]
        if self.template is None:
            return "".join(message["content"] for message in safe)
        if not safe:
            raise DataError("a chat template needs at least one message")
        described = [self._marked_strings(tool) for tool in tools] or None
        try:
            return self._apply([_with_mappings(message) for message in safe], described, prompt)
        except Exception as error:  # a template can raise anything
            if not any("tool_calls" in message for message in safe):
                raise _rejected(messages, error) from error
        try:
            return self._apply(safe, described, prompt)  # DeepSeek's templates want the arguments as text
        except Exception as error:
            raise _rejected(messages, error) from error

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, as `render` returns it, without added special tokens."""
        parts = self._split.split(text) if _MARK in text else [text]
        return [
            token for part in parts if part for token in self._tokenizer(part, add_special_tokens=False)["input_ids"]
        ]

    def mark(self, text: str, role: str) -> str:
        """Mark special tokens that `text` of a message of `role` spells; a system message may contain them.

        An assistant's own marks of its reasoning are kept, since templates look for them.
        """
        if role == "system":
            return text
        spelled = self._spelled_by_assistant if role == "assistant" else self._spelled
        return spelled.sub(lambda found: found[0][0] + _MARK + found[0][1:], text) if spelled else text

    @property
    def begin(self) -> list[int]:
        """The beginning-of-sequence token of a text without chat template, if the tokenizer adds one."""
        ids = list(self._tokenizer("")["input_ids"])
        return ids[:1] if self.template is None and ids and ids[0] == self._tokenizer.bos_token_id else []

    @cached_property
    def special(self) -> re.Pattern[str]:
        """Matches a special token."""
        names = {token.content for token in self._added if token.special} | set(self._tokenizer.all_special_tokens)
        return _any_of(names) or re.compile(r"(?!)")

    @cached_property
    def turn_ends(self) -> frozenset[str]:
        """The special tokens that the template puts at the end of the last turn, an answer or a tool call."""
        user: Message = {"role": "user", "content": "a"}
        answer: Message = {"role": "assistant", "content": _PROBE}
        call: Message = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}
        return frozenset(filter(None, (self._end_of([user, answer], last=True), self._end_of([user, call], last=True))))

    @cached_property
    def ends(self) -> frozenset[str]:
        """As `turn_ends`, and the special token at the end of an answer that another message follows."""
        user: Message = {"role": "user", "content": "a"}
        answer: Message = {"role": "assistant", "content": _PROBE}
        return self.turn_ends | frozenset(filter(None, [self._end_of([user, answer, user], last=False)]))

    def _end_of(self, messages: Sequence[Message], *, last: bool) -> str | None:
        """The last or the first special token after the probe in `messages`, if there is one."""
        if self.template is None:
            return None
        try:
            text = self.render(messages)
        except DataError:  # a template without such messages has no end for them
            return None
        found = self.special.findall(text.rpartition(_PROBE)[2])
        return found[-1 if last else 0] if found else None

    def _apply(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, prompt: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        )

    def _safe(self, message: Message) -> dict[str, Any]:
        role = message["role"]
        safe: dict[str, Any] = {**message, "content": self.mark(text_of(message), role)}
        if "reasoning_content" in message:
            safe["reasoning_content"] = safe["thinking"] = self.mark(message["reasoning_content"], "user")
        if "tool_calls" in message:
            safe["tool_calls"] = self._marked_strings(message["tool_calls"])
        return safe

    def _marked_strings(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.mark(value, "tool")
        if isinstance(value, Mapping):
            return {self._marked_strings(key): self._marked_strings(each) for key, each in value.items()}
        return [self._marked_strings(each) for each in value] if isinstance(value, list | tuple) else value

    @cached_property
    def _knows_tools(self) -> bool:
        return self.template is not None and "tool" in self.template

    @cached_property
    def _added(self) -> list[Any]:
        return list(getattr(self._tokenizer, "added_tokens_decoder", {}).values())

    @cached_property
    def _spelled(self) -> re.Pattern[str] | None:
        names = {token.content for token in self._added if token.special or token.content[:1] in "<[{|"}
        return _any_of(name for name in names | set(self._tokenizer.all_special_tokens) if len(name) > 1)

    @cached_property
    def _spelled_by_assistant(self) -> re.Pattern[str] | None:
        names = {token.content for token in self._added if token.special and "think" not in token.content.lower()}
        return _any_of(name for name in names if len(name) > 1)

    @cached_property
    def _split(self) -> re.Pattern[str]:
        names = {token.content for token in self._added} | set(self._tokenizer.all_special_tokens)
        forms = (f"(?<={re.escape(name[0])}){_MARK}(?={re.escape(name[1:])})" for name in names if len(name) > 1)
        return re.compile("|".join(forms) or "(?!)")


def _any_of(names: Any) -> re.Pattern[str] | None:
    found = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found))) if found else None


def _with_mappings(message: Mapping[str, Any]) -> dict[str, Any]:
    """`message` with the arguments of its tool calls as mappings, where they are a JSON object."""
    plain = dict(message)
    if "tool_calls" in message:
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _mapping(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return plain


def _mapping(arguments: str) -> Any:
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_text(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    """The conversation without tools: their descriptions, calls and results are text."""
    plain = [_message_as_text(message) for message in messages]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = (
        f"You may call these tools:\n{listed}\n"
        'Call one by writing <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.'
    )
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{text_of(plain[0])}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _message_as_text(message: Message) -> Message:
    text = text_of(message)
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    for call in message.get("tool_calls", ()):
        function = call["function"]
        inner = json.dumps({"name": function["name"], "arguments": _mapping(function["arguments"])}, ensure_ascii=False)
        text = f"{text}\n<tool_call>\n{inner}\n</tool_call>".lstrip("\n")
    plain: Message = {"role": message["role"], "content": text}
    if "reasoning_content" in message:
        plain["reasoning_content"] = message["reasoning_content"]
    return plain


def _rejected(messages: Sequence[Message], error: Exception) -> DataError:
    roles = [message["role"] for message in messages]
    return DataError(
        f"the model's chat template rejects a conversation with the roles {roles}: {error or type(error).__name__}. "
        "Give roles that the template has, or set another policy.chat_template"
    )
