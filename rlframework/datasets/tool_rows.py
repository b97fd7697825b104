"""Read what published rows say of tools: those of a conversation, the calls of a turn, and a tool's answer.

Files of tables (Parquet, Arrow) give all rows the same keys, with null for the absent ones, so null values are dropped;
those in arguments that are JSON text are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlframework.base.errors import DataError
from rlframework.interfaces.messages import ToolCall, ToolSpec

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


def read_tools(value: Any, where: str) -> tuple[ToolSpec, ...]:
    """Return the tools of a conversation: a list of OpenAI's tools, or of their functions alone, or either as JSON.

    Raises a `DataError` that begins with `where` for anything else; None is no tools.
    """
    given = _loaded(value, where) if isinstance(value, str) else value
    if given is None:
        return ()
    if not isinstance(given, list):
        raise DataError(f"{where}: must be a list of tools, or one as JSON, not {type(given).__name__}")
    return tuple(_tool(without_nulls(tool), f"{where}, tool {number}") for number, tool in enumerate(given, 1))


def structured_parts(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what `message` has besides role and content: `tool_calls`, `reasoning_content`, `tool_call_id`, `name`.

    `function_call`, the older form, counts as one tool call. Raises a `DataError` that begins with `where`.
    """
    found: dict[str, Any] = {}
    calls = message.get("tool_calls") or [call for call in [message.get("function_call")] if call]
    if not isinstance(calls, list):
        raise DataError(f"{where}: tool_calls must be a list, not {type(calls).__name__}")
    if calls:
        found["tool_calls"] = [_call(call, number, where) for number, call in enumerate(calls)]
    for name in ("reasoning_content", "tool_call_id", "name"):
        if message.get(name):
            if not isinstance(message[name], str):
                raise DataError(f"{where}: {name} must be text, not {type(message[name]).__name__}")
            found[name] = message[name]
    return found


def without_nulls(value: Any) -> Any:
    """Return `value` without the keys of mappings whose value is null, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _tool(tool: Any, where: str) -> ToolSpec:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"{where}: must be an object with the name of a function, not {tool!r:.80}")
    parameters = function.get("parameters", _NO_ARGUMENTS)
    if not isinstance(parameters, Mapping):
        raise DataError(f"{where}: parameters must be a JSON schema, an object, not {type(parameters).__name__}")
    description = str(function.get("description", ""))
    return {
        "type": "function",
        "function": {"name": function["name"], "description": description, "parameters": parameters},
    }


def _call(call: Any, number: int, where: str) -> ToolCall:
    place = f"{where}, tool call {number + 1}"
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"{place}: must name a function and its arguments, not {call!r:.80}")
    given = function.get("arguments") or {}
    arguments = _loaded(given, f"{place}, arguments") if isinstance(given, str) else without_nulls(given)
    if not isinstance(arguments, Mapping):
        raise DataError(f"{place}: the arguments must be a JSON object, not {arguments!r:.80}")
    text = json.dumps(arguments, ensure_ascii=False)
    identity = str(call.get("id") or f"call_{number}")
    return {"id": identity, "type": "function", "function": {"name": function["name"], "arguments": text}}


def _loaded(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not JSON ({error})") from error
