"""The assistant turn that a completion's text holds: its reasoning, its content and its tool calls.

Most models write a call as JSON, some as one of a Python function, which is read and not evaluated.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

from rlframework.interfaces.messages import FunctionCall, Message, encodable


@dataclass(frozen=True)
class ParsedCall:
    """A tool call as the model wrote it; `arguments` is text, JSON or not. `name` is empty if none was found."""

    name: str
    arguments: str

    @property
    def function(self) -> FunctionCall:
        """The call as a message has it; halves of characters, which JSON can spell, are replaced."""
        return {"name": encodable(self.name), "arguments": encodable(self.arguments)}


@dataclass(frozen=True)
class ParsedTurn:
    """The parts of an assistant turn. `reasoning` is None if the turn has none."""

    content: str
    reasoning: str | None = None
    calls: tuple[ParsedCall, ...] = ()

    def message(self, ids: list[str]) -> Message:
        """Return the turn as a message; `ids` are those of its tool calls, at least as many."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": ids[number], "type": "function", "function": call.function}
                for number, call in enumerate(self.calls)
            ]
        return message


def call_of_json(text: str) -> ParsedCall:
    """Return the call that the JSON object `text` describes by `name` and `arguments` (Llama: `parameters`).

    If it describes none, the whole text is the call's arguments, so that the environment refuses it and says why.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ParsedCall("", text.strip())
    return call_of(found, text)


def call_of(found: Any, text: str) -> ParsedCall:
    """Return the call that the JSON value `found` describes; `text` is how the model wrote it."""
    key = next((key for key in ("arguments", "parameters") if isinstance(found, dict) and key in found), None)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return ParsedCall("", text.strip())
    arguments = {} if key is None else found[key]
    if isinstance(arguments, str):
        return ParsedCall(found["name"], arguments)
    try:
        return ParsedCall(found["name"], json.dumps(arguments))
    except RecursionError:  # read, but too deep to be written
        return ParsedCall("", text.strip())


_BLOCK = re.compile(r"<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|\Z)", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_JSON_NAMES = {"true": True, "false": False, "null": None}


def python_calls(text: str) -> tuple[str, tuple[ParsedCall, ...]]:
    """Return the content of `text` and its calls. Nothing is evaluated but literals."""
    calls = tuple(call for block in _BLOCK.findall(text) for call in _calls(block.strip()))
    return (_BLOCK.sub("", text).strip() if calls else text), calls


def _calls(block: str) -> list[ParsedCall]:
    """The calls in a list, or one call; the whole block as the arguments of one if it is anything else."""
    for text in dict.fromkeys((block, block.replace("\n", "\\n"))):  # templates write line breaks in texts as they are
        try:
            body = ast.parse(_ESCAPE.sub(_kept, text), mode="eval").body
            found = [_call(each) for each in (body.elts if isinstance(body, ast.List) else [body])]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # the last: nested too deeply
            continue
        return found or [_malformed(block)]
    return [_malformed(block)]


def _malformed(text: str) -> ParsedCall:
    """A call whose arguments are what the model wrote."""
    return ParsedCall("", text.strip())


def _call(node: ast.expr) -> ParsedCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with arguments by name")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("arguments without a name, or twice the same")
        arguments[keyword.arg] = ast.literal_eval(_Literals().visit(keyword.value))
    return ParsedCall(ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False))


def _kept(escape: re.Match[str]) -> str:
    r"""An escape that Python does not know, such as `\d`, means itself; Python warns of it."""
    return escape[0] if escape[1] in "\\'\"\nabfnrtv01234567xuUN" else f"\\{escape[0]}"


class _Literals(ast.NodeTransformer):
    """Replaces the names of JSON's constants by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node
