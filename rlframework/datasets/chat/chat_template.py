"""Render messages with a chat template: tool calls, tools and reasoning in the form that the template expects.

Templates that know no tools get them as text in the Hermes format, which `reply_parser` reads where a template has none
of its own.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import DataError
from rlframework.interfaces.messages import Message, ToolCall, ToolSpec, pictures_of, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)

_READS_TYPE = re.compile(r"""'type'|"type"|\.type\b""")
"""Matches where a template may tell parts of a content by their type."""

PROBE = "7305186249"
"""A content and an argument that templates leave as they are, and that is in no template's own text."""
_PROBE_TOOL: ToolSpec = {
    "type": "function",
    "function": {"name": f"f{PROBE}", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_PROBE_CALL: ToolCall = {
    "id": "probe0000",
    "type": "function",
    "function": {"name": f"f{PROBE}", "arguments": "{}"},
}
ASKED: Message = {"role": "user", "content": "a"}
"""The first message of the conversations that a template is tried with."""


def _calling(call: ToolCall) -> tuple[Message, ...]:
    """A conversation with one call."""
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    return ASKED, turn, {"role": "tool", "content": "b", "tool_call_id": call["id"]}


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    *,
    prompt: bool = False,
) -> str:
    """Return the text that the chat template of `tokenizer` makes of `messages`; `prompt`: the model answers next.

    Arguments of tool calls are given as mappings, or as text if the template rejects those. Arguments that are no JSON
    object are text, or the value of `arguments` in a mapping for a template that does not write text. A template that
    writes neither tools nor calls gets them as text, see `tools_as_text`. Raises a `DataError` that names the roles if
    there are no messages, or the template rejects them in all of these forms.
    """
    if not messages:
        raise DataError("a chat template needs at least one message")
    failed: Exception | None = None
    template = template_text(tokenizer) or ""
    in_parts = bool(pictures_of(messages)) or not _writes_texts(tokenizer, template)
    has_tools = knows_tools(tokenizer)
    if has_tools and not _writes_text_arguments(tokenizer, template):  # Qwen3.5 and GLM iterate over them
        messages = list(map(_with_objects, messages))
    for given, listed in _forms(messages, tools, template, has_tools=has_tools):
        try:
            return _apply(tokenizer, list(map(_with_parts, given)) if in_parts else given, listed, prompt)
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            failed = error
    raise _rejected(messages, failed) from failed


def template_text(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the chat template of `tokenizer`, all of them if it has several by name, or None if it has none."""
    template: str | Mapping[str, str] | None = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, Mapping) else template


def template_message(message: Message, *, mappings: bool = True) -> dict[str, Any]:
    """Return `message` as templates read it: contents as text, or as parts if they have images, the arguments of tool
    calls as `mappings` or as text.

    Arguments that are not a JSON object stay text, as the model wrote them. Reasoning has both names that templates
    use, `reasoning_content` and `thinking`.
    """
    parts = message["content"]
    plain: dict[str, Any] = {"role": message["role"], "content": text_of(message)}
    if not isinstance(parts, str) and pictures_of([message]):
        plain["content"] = [part if part["type"] == "text" else {"type": "image"} for part in parts]
    plain |= {key: message[key] for key in ("tool_call_id", "name") if key in message}
    if "reasoning_content" in message:
        plain["reasoning_content"] = plain["thinking"] = message["reasoning_content"]
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_template_call(call) if mappings else call for call in calls]
    return plain


def knows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template of `tokenizer` writes tools or their calls, or rejects all that was tried."""
    return _writes_tools(tokenizer, template_text(tokenizer) or "")


def _forms(
    messages: Sequence[Message], tools: Sequence[ToolSpec], template: str, *, has_tools: bool
) -> Iterator[tuple[list[dict[str, Any]], Sequence[ToolSpec]]]:
    """Messages and tools in the forms that chat templates take, to be tried in turn."""
    if not has_tools:
        yield [template_message(message) for message in tools_as_text(messages, tools)], ()
        if tools:  # Gemma 2 has no system role
            yield [template_message(message) for message in tools_as_text(messages, tools, role="user")], ()
        return
    if tools and _LOG.isEnabledFor(logging.WARNING):
        _warn_of_unlisted_tools(template)
    yield [template_message(message) for message in messages], tools
    if any(message.get("tool_calls") for message in messages):
        # DeepSeek-R1 wants the arguments as text; gpt-oss wants content or reasoning, not both, beside a call
        yield [template_message(message, mappings=False) for message in messages], tools
        yield [template_message(_with_content_as_reasoning(message)) for message in messages], tools


@contextmanager
def without_template_warnings() -> Iterator[None]:
    """Context in which nothing is logged about templates: that of a trained model is what it was trained with."""
    level = _LOG.level
    _LOG.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _LOG.setLevel(level)


@lru_cache(maxsize=16)  # logged once for a template
def _warn_of_unlisted_tools(template: str) -> None:
    """Log that prompts do not list the tools, if the template has no variable `tools`."""
    if not re.search(r"\btools\b", template):
        _LOG.warning(
            "the chat template writes tool calls but not the tools that may be called (it does not use the variable "
            "`tools`), so prompts have no list of them: describe them in the system prompt, or set "
            "policy.chat_template to one that lists `tools`"
        )


def _with_objects(message: Message) -> Message:
    """`message` with arguments of its tool calls that are no JSON object as a text in one; none are an empty object."""
    if all(_arguments_of(call) is not None for call in message.get("tool_calls", ())):
        return message
    calls: list[ToolCall] = []
    for call in message["tool_calls"]:
        name, text = call["function"]["name"], call["function"]["arguments"]
        if _arguments_of(call) is None:
            text = json.dumps({"arguments": text} if text.strip() else {})
        calls.append({**call, "function": {"name": name, "arguments": text}})
    return {**message, "tool_calls": calls}


def _with_content_as_reasoning(message: Message) -> Message:
    """`message` with its content at the end of its reasoning, if it has both and calls tools."""
    thought, text = message.get("reasoning_content"), text_of(message)
    if not (message.get("tool_calls") and thought and text):
        return message
    return {**message, "content": "", "reasoning_content": f"{thought}\n\n{text}"}


def _apply(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Sequence[ToolSpec], prompt: bool
) -> str:
    given: list[Any] | None = list(tools) or None
    return str(tokenizer.apply_chat_template(messages, tools=given, tokenize=False, add_generation_prompt=prompt))


@lru_cache(maxsize=16)
def _writes_texts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether the template writes contents that are texts; some of vision-language models skip all but parts."""
    if not _READS_TYPE.search(template):
        return True
    try:
        return PROBE in _apply(tokenizer, [{"role": "user", "content": PROBE}], (), prompt=False)
    except Exception:  # noqa: BLE001 - a template that rejects this conversation may take others
        return True


@lru_cache(maxsize=16)
def _writes_tools(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether a tool or a call is in what the template writes; some only have a role for answers, or reject it."""
    if "tool" not in template:
        return False
    called = _calling(_PROBE_CALL)
    texts = [
        _tried(tokenizer, template, called, [_PROBE_TOOL]),
        _tried(tokenizer, template, called, [_PROBE_TOOL], mappings=False),
        _tried(tokenizer, template, [ASKED], [_PROBE_TOOL]),
    ]
    return any(PROBE in (text or "") for text in texts) or texts == [None] * len(texts)


@lru_cache(maxsize=16)
def _writes_text_arguments(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether arguments that are no JSON object are in what the template writes."""
    call: ToolCall = {**_PROBE_CALL, "function": {"name": "f", "arguments": f"{{{PROBE}"}}
    return PROBE in (_tried(tokenizer, template, _calling(call), []) or "")


def _tried(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    *,
    mappings: bool = True,
) -> str | None:
    """The text that the template makes of `messages`, or None if it rejects them in this form."""
    given = [template_message(message, mappings=mappings) for message in messages]
    given = given if _writes_texts(tokenizer, template) else list(map(_with_parts, given))
    try:
        return _apply(tokenizer, given, tools, prompt=True)
    except Exception:  # noqa: BLE001 - a template can raise anything
        return None


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with its text as a part."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _template_call(call: ToolCall) -> dict[str, Any]:
    function, arguments = call["function"], _arguments_of(call)
    return {**call, "function": {**function, "arguments": function["arguments"] if arguments is None else arguments}}


def _arguments_of(call: ToolCall) -> Mapping[str, Any] | None:
    """The arguments of `call`, or None if they are not a JSON object. Halves of characters in them are replaced."""
    text = call["function"]["arguments"]
    try:
        arguments = json.loads(text)
        if "\\ud" in text.lower():  # an escape that may be half of a character, which no tokenizer takes
            arguments = json.loads(json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _rejected(messages: Sequence[Message], error: Exception | None) -> DataError:
    from jinja2 import TemplateSyntaxError, UndefinedError

    roles = [message["role"] for message in messages]
    remedy = (
        "If it has no system role, remove environment.system_prompt and the system turns in the data, or set another "
        "policy.chat_template"
    )
    if isinstance(error, (TemplateSyntaxError, UndefinedError)):
        remedy = "Correct the template: policy.chat_template, or that of the tokenizer"
    return DataError(
        f"the model's chat template rejects a conversation with the roles {roles}: {error or type(error).__name__}. "
        f"{remedy}"
    )


def tools_as_text(messages: Sequence[Message], tools: Sequence[ToolSpec], *, role: str = "system") -> list[Message]:
    """Return `messages` without calls and tool results, which become text, and with a description of `tools`.

    Results become user messages, one for those that follow one another, since templates may want roles to alternate.
    The system message describes the tools. Without one, the first message does, of the role `role`: system, or user
    where the template has no system role.
    """
    plain: list[Message] = []
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        some = list(group)
        plain += [_results_as_text(some)] if are_results else [_turn_as_text(message) for message in some]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = (
        f"You may call these tools:\n{listed}\n"
        'Call one by writing <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.'
    )
    first = plain[0] if plain else None
    if first and first["role"] == "system":
        return [{**first, "content": f"{text_of(first)}\n\n{text}"}, *plain[1:]]
    if first and first["role"] == role:
        return [{**first, "content": f"{text}\n\n{text_of(first)}"}, *plain[1:]]
    return [{"role": role, "content": text}, *plain]


def _results_as_text(results: Sequence[Message]) -> Message:
    texts = [f"<tool_response>\n{text_of(message)}\n</tool_response>" for message in results]
    return {"role": "user", "content": "\n".join(texts)}


def _turn_as_text(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    text = text_of(message)
    for call in message["tool_calls"]:
        text = f"{text}\n<tool_call>\n{_call_as_text(call)}\n</tool_call>".lstrip("\n")
    plain: Message = {"role": message["role"], "content": text}
    if "reasoning_content" in message:
        plain["reasoning_content"] = message["reasoning_content"]
    return plain


def _call_as_text(call: ToolCall) -> str:
    """The JSON of a call; arguments that are not JSON are a text in it. Halves of characters are replaced."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        text = json.dumps({"name": name, "arguments": json.loads(arguments)}, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()
