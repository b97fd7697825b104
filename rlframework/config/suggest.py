"""Finds the valid key closest to a misspelled one."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any, get_args

from pydantic import BaseModel

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


def key_paths(model: type[BaseModel], above: Path = ()) -> Iterator[Path]:
    """Yield the path of every key of `model`, including sections and their keys, from the top."""
    for name, info in model.model_fields.items():
        path = (*above, info.alias or name)
        yield path
        for inner in models_in(info.annotation):
            yield from key_paths(inner, path)


def nearest_key(path: Path, model: type[BaseModel]) -> Path | None:
    """Return the key of `model` that was most likely meant by `path`, or None if nothing is similar.

    In order of preference: a key of the same name deeper in the same section (`policy.optimizer.lr` for `policy.lr`);
    a sibling that differs by a letter or two; a key of the same name anywhere; a similar sibling; a similar key
    anywhere.
    """
    paths = list(key_paths(model))
    parent, name = path[:-1], path[-1]
    beside = [other for other in paths if other[:-1] == parent]
    inside = [other for other in paths if other[: len(parent)] == parent and other[-1] == name] if parent else []
    return (
        _first(inside)
        or _closest(path, beside, VERY_CLOSE)
        or _nearest_namesake(path, [other for other in paths if other[-1] == name])
        or _closest(path, beside, CLOSE)
        or _closest(path, paths, VERY_CLOSE)
    )


def is_misspelling(path: Path, meant: Path) -> bool:
    """Return True if `meant` is a very similar sibling of `path`."""
    return path[:-1] == meant[:-1] and _similarity(path[-1], meant[-1]) >= VERY_CLOSE


def _first(paths: list[Path]) -> Path | None:
    return min(paths, key=len, default=None)


def _nearest_namesake(path: Path, paths: list[Path]) -> Path | None:
    return max(paths, key=lambda other: _similarity(".".join(path), ".".join(other)), default=None)


def _closest(path: Path, paths: list[Path], cutoff: float) -> Path | None:
    """The path whose last component is most similar to that of `path`; ties go to the most similar full path."""

    def score(other: Path) -> tuple[float, float]:
        return _similarity(path[-1], other[-1]), _similarity(".".join(path), ".".join(other))

    best = max(paths, key=score, default=None)
    return best if best is not None and score(best)[0] >= cutoff else None


def _similarity(left: str, right: str) -> float:
    return SequenceMatcher(None, left.lower(), right.lower()).ratio()
