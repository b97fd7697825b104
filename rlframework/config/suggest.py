"""The nearest right key to one that was misspelt."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any, get_args

from pydantic import BaseModel

Path = tuple[str, ...]

CLOSE = 0.6
"""Least similarity (of `difflib`) at which a key is worth naming."""

VERY_CLOSE = 0.75
"""Similarity at which a key beside the misspelt one wins over a key of exactly that name elsewhere."""


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models inside a field's annotation: `Model`, `Model | None`, `Annotated[Model, ...]`, `list[Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def key_paths(model: type[BaseModel], above: Path = ()) -> Iterator[Path]:
    """Every key of `model`, sections and what is in them, from the top."""
    for name, info in model.model_fields.items():
        path = (*above, info.alias or name)
        yield path
        for inner in models_in(info.annotation):
            yield from key_paths(inner, path)


def nearest_key(path: Path, model: type[BaseModel]) -> Path | None:
    """The key of `model` that somebody who wrote `path` most likely meant; None when nothing is near.

    In this order: a key of the same name further down in the same section (`policy.lr`: `policy.optimizer.lr`); one
    beside it that differs by a letter or two; one of the same name anywhere; a similar one beside it; a similar one
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


def _first(paths: list[Path]) -> Path | None:
    return min(paths, key=len, default=None)


def _nearest_namesake(path: Path, paths: list[Path]) -> Path | None:
    return max(paths, key=lambda other: _similarity(".".join(path), ".".join(other)), default=None)


def _closest(path: Path, paths: list[Path], cutoff: float) -> Path | None:
    """The one whose last part is most like that of `path`; of equals, the one in the most similar place."""

    def score(other: Path) -> tuple[float, float]:
        return _similarity(path[-1], other[-1]), _similarity(".".join(path), ".".join(other))

    best = max(paths, key=score, default=None)
    return best if best is not None and score(best)[0] >= cutoff else None


def _similarity(left: str, right: str) -> float:
    return SequenceMatcher(None, left.lower(), right.lower()).ratio()
