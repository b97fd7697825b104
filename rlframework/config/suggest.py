"""Finds the valid key closest to a misspelled one."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Path = tuple[str, ...]

CLOSE = 0.6
"""Minimum `difflib` similarity for a key to be suggested."""

VERY_CLOSE = 0.75
"""Similarity at which a sibling of the misspelled key is preferred to a key of exactly that name elsewhere."""


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models inside a field's annotation: `Model`, `Model | None`, `Annotated[Model, ...]`, `list[Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def key_paths(model: type[BaseModel], above: Path = ()) -> dict[Path, FieldInfo]:
    """Return the field of every key of `model`, including sections and their keys, by its path from the top."""
    found: dict[Path, FieldInfo] = {}
    for name, info in model.model_fields.items():
        path = (*above, info.alias or name)
        found[path] = info
        for inner in models_in(info.annotation):
            found = key_paths(inner, path) | found
    return found


def nearest_key(path: Path, model: type[BaseModel]) -> Path | None:
    """Return the key of `model` that was most likely meant by `path`, or None if nothing is similar.

    In order of preference: a key of the same name deeper in the same section (`policy.optimizer.lr` for `policy.lr`);
    a sibling that differs by a letter or two; a key of the same name anywhere; a similar sibling; a similar key
    anywhere.
    """
    parent, name = path[:-1], path[-1]

    def preferences(other: Path) -> tuple[bool, ...]:
        same, beside, near = other[-1] == name, other[:-1] == parent, _similarity(name, other[-1])
        inside = bool(parent) and other[: len(parent)] == parent
        return (inside and same, beside and near >= VERY_CLOSE, same, beside and near >= CLOSE, near >= VERY_CLOSE)

    def rank(other: Path) -> tuple[tuple[bool, ...], float, float]:
        return preferences(other), _similarity(name, other[-1]), _similarity(".".join(path), ".".join(other))

    best = max(key_paths(model), key=rank, default=None)
    return best if best is not None and any(preferences(best)) else None


def is_misspelling(path: Path, meant: Path) -> bool:
    """Return True if `meant` is a very similar sibling of `path`."""
    return path[:-1] == meant[:-1] and _similarity(path[-1], meant[-1]) >= VERY_CLOSE


def _similarity(left: str, right: str) -> float:
    return SequenceMatcher(None, left.lower(), right.lower()).ratio()
