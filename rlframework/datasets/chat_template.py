"""Render messages with a chat template: tool calls, tools and reasoning in the form that templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlframework.errors import DataError
from rlframework.interfaces.messages import Message, ToolCall, ToolSpec, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    **options: Any,
) -> str:
    """Return the text that the chat template of `tokenizer` makes of `messages`.

    `options`: of `apply_chat_template`, such as `add_generation_prompt`. Raises a `DataError` that names the roles if
    there are no messages, or the template rejects them.
    """
    if not messages:
        raise DataError("a chat template needs at least one message")
    plain, specs = [template_message(message) for message in messages], list[Any](tools) or None
    try:
        return str(tokenizer.apply_chat_template(plain, tools=specs, tokenize=False, **options))
    except Exception as error:  # a template can raise anything
        roles = [message["role"] for message in messages]
        raise DataError(
            f"the model's chat template rejects a conversation with the roles {roles}: "
            f"{error or type(error).__name__}. If it has no "
            "system role, remove environment.system_prompt and the system turns in the data, or set another "
            "policy.chat_template"
        ) from error


def template_message(message: Message) -> dict[str, Any]:
    """Return `message` as templates read it: contents as text, the arguments of tool calls as mappings.

    Arguments that are not a JSON object stay text, as the model wrote them.
    """
    plain: dict[str, Any] = {"role": message["role"], "content": text_of(message)}
    plain |= {key: message[key] for key in ("tool_call_id", "name", "reasoning_content") if key in message}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_template_call(call) for call in calls]
    return plain


def _template_call(call: ToolCall) -> dict[str, Any]:
    function, arguments = call["function"], arguments_of(call)
    return {**call, "function": {**function, "arguments": function["arguments"] if arguments is None else arguments}}


def arguments_of(call: ToolCall) -> Mapping[str, Any] | None:
    """Return the arguments of `call`, or None if they are not a JSON object."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None
