"""Hints for unknown keys: the closest valid key, or what plugins know of the words of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlframework.base.secrets import hide_secrets, is_secret_name
from rlframework.config.further_policies import FURTHER_POLICIES

Path = tuple[str, ...]

CLOSE = 0.6
"""Minimum `difflib` similarity for a sibling of the unknown key to be suggested."""

VERY_CLOSE = 0.75
"""Minimum similarity of other keys; such a sibling is preferred to a key of exactly that name elsewhere."""

ANY = "NAME"
"""In the path of a key: any name."""

MISSPELLED = 0.85
"""Minimum similarity for a sibling to be preferred to the word of a peer."""

_LONGEST = 40


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models inside a field's annotation: `Model`, `Model | None`, `Annotated[Model, ...]`, `list[Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def key_paths(model: type[BaseModel], above: Path = ()) -> dict[Path, FieldInfo]:
    """Return the field of every key of `model`, including sections and their keys, by its path from the top.

    A name that the user chooses, as of each reward, is `ANY` in a path.
    """
    found: dict[Path, FieldInfo] = {}
    for name, info in model.model_fields.items():
        path = (*above, info.alias or name)
        found[path] = info
        for annotation, place in _values(info.annotation, path):
            for inner in models_in(annotation):
                found = key_paths(inner, place) | found
    return found


def _values(annotation: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    """The annotations within that of the key `path`, with the paths of their values; of a mapping, its items."""
    parts = get_args(annotation)
    if get_origin(annotation) in (dict, Mapping):
        yield parts[1], (*path, ANY)
    elif any(get_origin(part) in (dict, Mapping) for part in parts):
        for part in parts:
            yield from _values(part, path)
    else:
        yield annotation, path


def _as_written(key: Path, path: Path) -> Path:
    """`key` with the user's names of `path` in place of `ANY`, as far as they are in the same place."""
    for index, part in enumerate(key):
        if part == ANY and index < len(path) - 1 and key[:index] == path[:index]:
            key = (*key[:index], path[index], *key[index + 1 :])
    return key


Hints = Callable[..., str]
"""Asks plugins about the words of other libraries: `hints("key_hint", path=..., value=..., model=...)` is the answer of
the hook `rlframework_key_hint` (see `rlframework.plugins.hookspec`), "" if there is none."""


def no_hints(hook: str, **arguments: Any) -> str:
    """Return "": there are no plugins to ask."""
    return ""


def unknown_key_hint(path: Path, value: Any, model: type[BaseModel], hints: Hints) -> str:
    """Suggest what `path` was meant to be: a misspelled sibling, else what `hints` say, else any similar key."""
    near = nearest_key(path, model)
    meant = f"Did you mean `{'.'.join(near)}`?" if near else ""
    misspelled = near is not None and near[:-1] == path[:-1] and _similarity(near[-1], path[-1]) >= MISSPELLED
    return meant if misspelled else hints("key_hint", path=path, value=value, model=model) or meant


def nearest_key(path: Path, model: type[BaseModel]) -> Path | None:
    """Return the key of `model` that was most likely meant by `path`, or None if nothing is similar.

    In order of preference: a key of the same name deeper in the same section (`policy.optimizer.lr` for `policy.lr`);
    a sibling that differs by a letter or two; a key of the same name anywhere; other similar keys. A key within a
    section is not taken for one of another section, except for a name that only that one has, or that others have
    deeper inside.
    """
    parent, name = path[:-1], path[-1]
    paths = dict.fromkeys(_as_written(key, path) for key in key_paths(model))
    known = [key for key in paths if key[0] not in FURTHER_POLICIES or key[0] == path[0] or len(key) == 1]
    if len(path) > 1 and any(key[0] == path[0] for key in known):
        same = [key for key in known if key[-1] == name and key[0] != path[0]]
        same = [key for key in same if len(key) == min(map(len, same))]
        known = [key for key in known if key[0] == path[0]] + (same if len(same) == 1 else [])

    def rank(other: Path) -> tuple[float, float]:
        near, inside = _similarity(name, other[-1]), parent and other[: len(parent)] == parent
        bonus = 1.0 if inside and name == other[-1] else 0.3 if parent == other[:-1] else 0.0
        return near + bonus, _similarity(".".join(path), ".".join(other))

    best = max(known, key=rank, default=None)
    needed = CLOSE if best and best[:-1] == parent else VERY_CLOSE
    return best if best and _similarity(name, best[-1]) >= needed else None


def _similarity(left: str, right: str) -> float:
    if len(left) > 10 * len(right):
        return 0.0  # such a key can be of any length, and comparing takes time in proportion
    return SequenceMatcher(None, left.lower(), right.lower()).ratio()


def section_example(path: Path, value: Any, model: type[BaseModel]) -> str:
    """Return how to write the section `path` of `model`, for which `value` was given; "" if that is unknown."""
    info = key_paths(model).get(path)
    if info is None or value is None or value is False or is_secret_name(path[-1]) or len(str(value)) > _LONGEST:
        return ""
    for section in models_in(info.annotation):
        fields = section.model_fields
        if value is True and not any(field.is_required() for field in fields.values()):
            return f"For its defaults, write `{path[-1]}: {{}}`."
        for name, field in fields.items():
            if type(field.default) is type(value) or (field.is_required() and field.annotation is type(value)):
                return f"For example, write `{path[-1]}: {{{name}: {hide_secrets(value)}}}`."
    return ""
