"""Parse tool calls in the form of Python, as LFM2 writes them: `<|tool_call_start|>[add(a=1)]<|tool_call_end|>`."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from rlframework.rollout.tool_calls import ParsedCall

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
