"""Validates a merged configuration against a model, and reports every problem with key, value, origin and hint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlframework.config.findings import NOT_GIVEN, Finding
from rlframework.config.load import Tree
from rlframework.config.peers import peer_hint
from rlframework.config.suggest import Path, is_misspelling, models_in, nearest_key
from rlframework.config.yaml_text import Keys

Model = TypeVar("Model", bound=BaseModel)

_ALLOWED = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a section (a mapping of keys)"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    "string_type": "must be a string (quote values that look like numbers)",
}
"""Pydantic error type to our message. Other types keep pydantic's message."""


def validate(
    tree: Tree, model: type[Model], elsewhere: Mapping[Keys, str] | None = None
) -> tuple[Model | None, list[Finding]]:
    """Return an instance of `model` and no findings, or None and the problems in `tree`.

    `elsewhere` has hints for keys that `model` lacks but that another choice of plugins would have.
    """
    try:
        config = model.model_validate(tree.values)
    except ValidationError as error:
        return None, _findings(error, tree, model, elsewhere or {})
    findings = list(_mistaken_booleans(tree.values, config.model_dump(mode="json"), (), tree))
    return (None, findings) if findings else (config, [])


def dotted(keys: Keys) -> str:
    """Join keys with dots: `("a", 0, "b")` becomes `a.0.b`."""
    return ".".join(str(key) for key in keys)


def _findings(
    error: ValidationError, tree: Tree, model: type[BaseModel], elsewhere: Mapping[Keys, str]
) -> list[Finding]:
    """One finding per key. The members of a union each report an error, and are joined as alternatives."""
    by_key: dict[Keys, Finding] = {}
    for item in error.errors(include_url=False, include_context=False):
        keys = _place(item["loc"], item["type"], tree.values)
        if item["type"] == "extra_forbidden":
            finding = _unknown_key(keys, tree, model, elsewhere)
        elif item["type"] == "missing":
            finding = _missing_key(keys, tree, model)
        else:
            message = _allowed(item["type"], item["msg"])
            finding = Finding(dotted(keys), message, _value(keys, tree.values), tree.origin(keys))
        known = by_key.get(keys)
        if known and finding.message != known.message:
            finding = Finding(
                known.key, f"{known.message}, or {finding.message}", known.given, known.origin, known.hint
            )
        by_key[keys] = finding
    return list(by_key.values())


def _unknown_key(keys: Keys, tree: Tree, model: type[BaseModel], elsewhere: Mapping[Keys, str]) -> Finding:
    value = _value(keys, tree.values)
    hint = elsewhere.get(keys) or _hint(tuple(str(key) for key in keys), value, model)
    return Finding(dotted(keys), "unknown key", value, tree.origin(keys), hint)


def _hint(path: Path, value: Any, model: type[BaseModel]) -> str:
    """Suggest what `path` was meant to be: a misspelled sibling first, then a peer's word, then any similar key."""
    near = nearest_key(path, model)
    if near and is_misspelling(path, near):
        return f"Did you mean `{'.'.join(near)}`?"
    return peer_hint(path, value) or (f"Did you mean `{'.'.join(near)}`?" if near else "")


def _missing_key(keys: Keys, tree: Tree, model: type[BaseModel]) -> Finding:
    description = _description(keys, model)
    message = f"required key is missing ({description})" if description else "required key is missing"
    return Finding(dotted(keys), message, NOT_GIVEN, tree.origin(keys[:-1]))


def _allowed(kind: str, message: str) -> str:
    if kind in _ALLOWED:
        return _ALLOWED[kind]
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"must {message.removeprefix('Input should ')}" if message.startswith("Input should ") else message


def _place(loc: Keys, kind: str, values: Any) -> Keys:
    """`loc` without the entries that pydantic adds for union members: only keys that are in `values`."""
    keys: list[str | int] = []
    for index, part in enumerate(loc):
        if _has(values, part):
            values = values[part]
            keys.append(part)
        elif kind == "missing" and index == len(loc) - 1:
            keys.append(part)
    return tuple(keys)


def _has(values: Any, part: str | int) -> bool:
    if isinstance(values, Mapping):
        return part in values
    return isinstance(values, list) and isinstance(part, int) and part < len(values)


def _value(keys: Keys, values: Any) -> Any:
    for key in keys:
        values = values[key]
    return values


def _description(keys: Keys, model: type[BaseModel]) -> str:
    """The description of the field at `keys`."""
    info = None
    for key in keys:
        if info is not None:
            inner = models_in(info.annotation)
            if not inner:
                return ""
            model = inner[0]
        info = model.model_fields.get(str(key))
        if info is None:
            return ""
    return (info.description or "") if info else ""


def _mistaken_booleans(given: Any, taken: Any, keys: Keys, tree: Tree) -> Iterator[Finding]:
    """Report booleans given for numbers and numbers given for booleans, which pydantic accepts."""
    if isinstance(given, Mapping) and isinstance(taken, Mapping):
        for key in given:
            if key in taken:
                yield from _mistaken_booleans(given[key], taken[key], (*keys, key), tree)
    elif isinstance(given, list) and isinstance(taken, list):
        for index, (left, right) in enumerate(zip(given, taken, strict=False)):
            yield from _mistaken_booleans(left, right, (*keys, index), tree)
    elif isinstance(given, bool) and isinstance(taken, (int, float)) and not isinstance(taken, bool):
        yield Finding(dotted(keys), "must be a number", given, tree.origin(keys))
    elif isinstance(taken, bool) and isinstance(given, (int, float)) and not isinstance(given, bool):
        yield Finding(dotted(keys), "must be true or false", given, tree.origin(keys))
