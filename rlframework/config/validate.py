"""Validates a merged configuration against a model, and reports every problem with key, value, origin and hint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlframework.config.peers import peer_hint
from rlframework.config.problems import NOT_GIVEN, Problem
from rlframework.config.suggest import Path, is_misspelling, key_paths, nearest_key
from rlframework.config.yaml_text import Keys, Tree

Model = TypeVar("Model", bound=BaseModel)

_ALLOWED = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a section (a mapping of keys)"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    "string_type": "must be a string (quote values that look like numbers)",
    "extra_forbidden": "unknown key",
    "missing": "required key is missing",
}
"""Pydantic error type to our message. Other types keep pydantic's message."""


def validate(
    tree: Tree, model: type[Model], elsewhere: Mapping[Keys, str] | None = None
) -> tuple[Model | None, list[Problem]]:
    """Return an instance of `model` and no problems, or None and the problems in `tree`.

    `elsewhere` has hints for keys that `model` lacks but that another choice of plugins would have.
    """
    try:
        config = model.model_validate(tree.values)
    except ValidationError as error:
        return None, _problems(error, tree, model, elsewhere or {})
    problems = list(_mistaken_booleans(tree.values, config.model_dump(mode="json"), (), tree))
    return (None, problems) if problems else (config, [])


def _problems(
    error: ValidationError, tree: Tree, model: type[BaseModel], elsewhere: Mapping[Keys, str]
) -> list[Problem]:
    """One problem per key. The members of a union each report an error, and are joined as alternatives."""
    by_key: dict[Keys, Problem] = {}
    for item in error.errors(include_url=False, include_context=False):
        kind, keys = item["type"], _place(item["loc"], item["type"], tree)
        path, value = tuple(map(str, keys)), tree.get(keys)
        problem = Problem(_dotted(keys), _message(kind, item["msg"]), given=value, origin=tree.origin(keys))
        if kind == "extra_forbidden":
            problem = replace(problem, hint=elsewhere.get(keys) or _hint(path, value, model))
        elif kind == "missing":
            info = key_paths(model).get(path)
            described = f" ({info.description})" if info and info.description else ""
            problem = replace(problem, message=f"{problem.message}{described}", origin=tree.origin(keys[:-1]))
        known = by_key.get(keys)
        if known and problem.message != known.message:
            problem = replace(known, message=f"{known.message}, or {problem.message}")
        by_key[keys] = problem
    return list(by_key.values())


def _hint(path: Path, value: Any, model: type[BaseModel]) -> str:
    """Suggest what `path` was meant to be: a misspelled sibling first, then a peer's word, then any similar key."""
    near = nearest_key(path, model)
    meant = f"Did you mean `{'.'.join(near)}`?" if near else ""
    return meant if near and is_misspelling(path, near) else peer_hint(path, value) or meant


def _message(kind: str, message: str) -> str:
    if kind in _ALLOWED:
        return _ALLOWED[kind]
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"must {message.removeprefix('Input should ')}" if message.startswith("Input should ") else message


def _place(loc: Keys, kind: str, tree: Tree) -> Keys:
    """`loc` without the entries that pydantic adds for union members: only keys that are in `tree`."""
    keys: Keys = ()
    for index, part in enumerate(loc):
        missing = kind == "missing" and index == len(loc) - 1
        if missing or tree.get((*keys, part)) is not NOT_GIVEN:
            keys = (*keys, part)
    return keys


def _dotted(keys: Keys) -> str:
    return ".".join(map(str, keys))


def _mistaken_booleans(given: Any, taken: Any, keys: Keys, tree: Tree) -> Iterator[Problem]:
    """Report booleans given for numbers and numbers given for booleans, which pydantic accepts."""
    if isinstance(given, (Mapping, list)) and isinstance(taken, (Mapping, list)):
        for key in given if isinstance(given, Mapping) else range(len(given)):
            if not isinstance(taken, Mapping) or key in taken:
                yield from _mistaken_booleans(given[key], taken[key], (*keys, key), tree)
    elif isinstance(given, bool) != isinstance(taken, bool) and {type(given), type(taken)} <= {bool, int, float}:
        message = "must be true or false" if isinstance(taken, bool) else "must be a number"
        yield Problem(_dotted(keys), message, given=given, origin=tree.origin(keys))
