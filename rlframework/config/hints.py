"""Hints for unknown keys: the closest valid key, or the name of a key that other libraries call differently.

`docs/moving/` explains the differences in meaning from TRL, peft, verl, OpenRLHF and NeMo-RL; a test holds the table of
their words to those pages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlframework.config.further_policies import FURTHER_POLICIES, in_section
from rlframework.config.peer_keys import OF_PAIRS, OF_SECTIONS_TOO, PEER_KEYS, REMARKS, WITHOUT_COUNTERPART
from rlframework.config.peer_values import value_hint
from rlframework.config.preference_algorithms import PreferenceConfig
from rlframework.config.problems import shortened
from rlframework.secrets import hide_secrets, is_secret_name

Path = tuple[str, ...]

CLOSE = 0.6
"""Minimum `difflib` similarity for a sibling of the unknown key to be suggested."""

VERY_CLOSE = 0.75
"""Minimum similarity of other keys; such a sibling is preferred to a key of exactly that name elsewhere."""

ANY = "NAME"
"""In the path of a key: any name."""

MISSPELLED = 0.85
"""Minimum similarity for a sibling to be preferred to the word of a peer."""

_IS = "In rlframework this is "
_HINTS = {
    **{word: f"{_IS}`{key}`. {REMARKS.get(word, '')}".rstrip() for word, key in PEER_KEYS.items()},
    **WITHOUT_COUNTERPART,
}
_MOST = 40
_MOST_NAMES = 12
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


def unknown_key_hint(path: Path, value: Any, model: type[BaseModel]) -> str:
    """Suggest what `path` was meant to be: a misspelled sibling, else what a peer means by it, else any similar key."""
    near = nearest_key(path, model)
    meant = f"Did you mean `{'.'.join(near)}`?" if near else ""
    misspelled = near is not None and near[:-1] == path[:-1] and _similarity(near[-1], path[-1]) >= MISSPELLED
    return meant if misspelled else peer_hint(path, value, model) or meant


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


def peer_hint(path: Path, value: Any = None, model: type[BaseModel] | None = None) -> str:
    """Return what the unknown key `path` is called in rlframework, or "" if no peer uses the word.

    If the key is a section, the hint has a line for each known key inside `value`, and one that names the others. Some
    words mean something else to the algorithm of `model`; one that is the name of its own key is no peer's.
    """
    algorithm = model.model_fields.get("algorithm") if model else None
    chosen = algorithm.annotation if algorithm else None
    of_pairs = isinstance(chosen, type) and issubclass(chosen, PreferenceConfig)
    if of_pairs and model and len(path) == 1 and ("algorithm", path[0]) in key_paths(model):
        return ""
    found = _hint_of(path, value, of_pairs=of_pairs)
    hints, others = _hints_inside(path, value, model, of_pairs=of_pairs)
    if others and not hints and model and _is_section(_word(path, PEER_KEYS), model):
        found += _without(others)
    if hints:
        lines = [f"\n    `{'.'.join(key)}`: {hint.removeprefix(_IS)}" for key, hint in hints.items()]
        more = f"\n    and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
        found = f"{found} Its keys in rlframework:{''.join(lines[:_MOST])}{more}{_without(others)}".lstrip()
    return in_section(found, path[0]) if path[0] in FURTHER_POLICIES else found


def _hints_inside(
    path: Path, value: Any, model: type[BaseModel] | None, *, of_pairs: bool
) -> tuple[dict[Path, str], list[Path]]:
    """Return the hints for the keys within `value`, by their paths from `path`, and the paths of keys without any.

    A section whose keys have no hints, but which has one itself, is not among the others.
    """
    ours = [key for key in key_paths(model) if key[0] not in FURTHER_POLICIES] if model else []
    hints, leaves = dict[Path, str](), list[Path]()
    for inside, item in keys_inside(path, value):
        if inside == path:
            continue
        leaf = not (isinstance(item, Mapping) and item)
        if hint := _hint_of(inside, item, of_pairs=of_pairs) or (leaf and _of_the_same_name(inside, item, ours)) or "":
            hints[inside[len(path) :]] = hint
        elif leaf:
            leaves.append(inside[len(path) :])
    sections = [key for key in hints if not any(other[: len(key)] == key != other for other in hints)]
    return hints, [leaf for leaf in leaves if not any(leaf[: len(key)] == key for key in sections)]


def _is_section(word: str, model: type[BaseModel]) -> bool:
    """Whether the key that a peer calls `word` is a section of `model`."""
    info = key_paths(model).get(tuple(PEER_KEYS.get(word, "").split(".")))
    return info is not None and bool(models_in(info.annotation))


def _of_the_same_name(path: Path, value: Any, ours: Collection[Path]) -> str:
    """The hint for a key that only one of `ours` is called like: by its section too, or by a name of several words.

    It has what `value` is here, too.
    """
    same = [key for key in ours if key[-1] == path[-1] and ("_" in path[-1] or key[-2:] == path[-2:])]
    key = ".".join(same[0]) if len(same) == 1 else ""
    return f"{_IS}`{key}`. {value_hint(key, value)}".rstrip() if key else ""


def _without(keys: Sequence[Path]) -> str:
    """The line that names `keys`, which no hint is about; "" if there are none."""
    if not keys:
        return ""
    named = ", ".join(shortened(".".join(key)) for key in keys[:_MOST_NAMES])
    count = "1 more key has" if len(keys) == 1 else f"{len(keys)} more keys have"
    return f"\n    {count} no counterpart that is known: {named}{', ...' if len(keys) > _MOST_NAMES else '.'}"


def _hint_of(path: Path, value: Any, *, of_pairs: bool) -> str:
    """The hint for the longest end of `path` that is a peer's word, and for its value; "" if there is none."""
    word = _word(path, PEER_KEYS)
    if word in OF_SECTIONS_TOO and isinstance(value, Mapping) and _word(path, _HINTS) == word:
        return ""
    if hint := (of_pairs and _longest(path, OF_PAIRS)) or _longest(path, _HINTS):
        return f"{hint} {value_hint(PEER_KEYS.get(word, ''), value, word)}".rstrip()
    return ""


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


def _longest(path: Path, table: Mapping[str, str]) -> str:
    """The entry for the longest end of `path`; "" if there is none."""
    return table.get(_word(path, table), "")


def _word(path: Path, table: Mapping[str, str]) -> str:
    """The longest end of `path` that is in `table`; "" if there is none."""
    ends = (".".join(path[start:]) for start in range(len(path)))
    return next((end for end in ends if end in table), "")


def keys_inside(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Each key within `value`, sections too, with its value; not those of a section that has no counterpart."""
    yield path, value
    if isinstance(value, Mapping) and not _longest(path, WITHOUT_COUNTERPART):
        for key, item in value.items():
            yield from keys_inside((*path, str(key)), item)
