"""Hints for keys and values of other libraries, as `rlframework.config.hints.Hints` asks for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from rlframework.config.further_policies import FURTHER_POLICIES, in_section
from rlframework.config.hints import Path, key_paths, models_in
from rlframework.config.problems import shortened
from rlframework.config.validate import metric_hint
from rlframework_tools.peers.frameworks import IS, vocabulary

OF_SECTIONS_TOO = ("optim", "model")
"""Keys that are the name of another framework's section, which has keys of its own."""

_MOST = 40
_MOST_NAMES = 12

_OBSERVERS: Mapping[str, str] = {
    **dict.fromkeys(("console", "tensorboard"), "true"),
    **dict.fromkeys(("wandb", "mlflow", "trackio"), "{}"),
}
"""Observers that peers have too, by the name of ours, with the value that enables each."""


def peer_hint(path: Path, value: Any = None, model: type[BaseModel] | None = None) -> str:
    """Return what the unknown key `path` is called in rlframework, or "" if no peer uses the word.

    If the key is a section, the hint has a line for each known key inside `value`, and one that names the others. Some
    words mean something else to the algorithm of `model`; one that is the name of its own key is no peer's.
    """
    algorithm = model.model_fields.get("algorithm") if model else None
    chosen = algorithm.annotation if algorithm else None
    of_pairs = bool(getattr(chosen, "on_preferences", False))
    if of_pairs and model and len(path) == 1 and ("algorithm", path[0]) in key_paths(model):
        return ""
    found = _hint_of(path, value, of_pairs=of_pairs)
    hints, others = _hints_inside(path, value, model, of_pairs=of_pairs)
    if others and not hints and model and _is_section(_word(path, vocabulary().keys), model):
        found += _without(others)
    if hints:
        lines = [f"\n    `{'.'.join(key)}`: {hint.removeprefix(IS)}" for key, hint in hints.items()]
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
    info = key_paths(model).get(tuple(vocabulary().keys.get(word, "").split(".")))
    return info is not None and bool(models_in(info.annotation))


def _of_the_same_name(path: Path, value: Any, ours: Collection[Path]) -> str:
    """The hint for a key that only one of `ours` is called like: by its section too, or by a name of several words.

    It has what `value` is here, too.
    """
    same = [key for key in ours if key[-1] == path[-1] and ("_" in path[-1] or key[-2:] == path[-2:])]
    key = ".".join(same[0]) if len(same) == 1 else ""
    return f"{IS}`{key}`. {value_hint(key, value)}".rstrip() if key else ""


def _without(keys: Sequence[Path]) -> str:
    """The line that names `keys`, which no hint is about; "" if there are none."""
    if not keys:
        return ""
    named = ", ".join(shortened(".".join(key)) for key in keys[:_MOST_NAMES])
    count = "1 more key has" if len(keys) == 1 else f"{len(keys)} more keys have"
    return f"\n    {count} no counterpart that is known: {named}{', ...' if len(keys) > _MOST_NAMES else '.'}"


def _hint_of(path: Path, value: Any, *, of_pairs: bool) -> str:
    """The hint for the longest end of `path` that is a peer's word, and for its value; "" if there is none."""
    known = vocabulary()
    word = _word(path, known.hints)
    if word in OF_SECTIONS_TOO and isinstance(value, Mapping):
        return ""
    if hint := (of_pairs and known.of_pairs.get(_word(path, known.of_pairs))) or known.hints.get(word):
        return f"{hint} {value_hint(known.keys.get(word, ''), value, word)}".rstrip()
    return ""


def _word(path: Path, table: Mapping[str, str]) -> str:
    """The longest end of `path` that is in `table`; "" if there is none."""
    ends = (".".join(path[start:]) for start in range(len(path)))
    return next((end for end in ends if end in table), "")


def keys_inside(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Each key within `value`, sections too, with its value; not those of a section that has no counterpart."""
    yield path, value
    if isinstance(value, Mapping) and vocabulary().keys.get(_word(path, vocabulary().keys)) != "":
        for key, item in value.items():
            yield from keys_inside((*path, str(key)), item)


def value_hint(key: str, value: object, word: str = "") -> str:
    """Return what the value of a peer is for our `key`, which the peer calls `word`; "" if it is no peer's, or ours."""
    written = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    known = vocabulary()
    if meaning := known.word_values.get(word, {}).get(written) or known.values.get(key, {}).get(written):
        return f"Another framework's {written} {meaning}."
    if key == "observers":
        return _observers(value)
    if key == "policy.scheduler":
        return _scheduler(value)
    if key == "checkpoints.metric":
        return metric_hint(value)
    if key == "checkpoints.best" and isinstance(value, Mapping):
        return "The name of the metric is the key checkpoints.metric, and checkpoints.best is highest or lowest."
    return ""


def _scheduler(value: object) -> str:
    """How to write `value`, a list of torch's schedulers; "" for anything else."""
    if not isinstance(value, list):
        return ""
    parts = {str(part.get("name", "")).rpartition(".")[2]: part for part in value if isinstance(part, Mapping)}
    kwargs = parts.get("LinearLR", {}).get("kwargs")
    steps = kwargs.get("total_iters", "N") if isinstance(kwargs, Mapping) else "N"
    name = "cosine" if "CosineAnnealingLR" in parts else "constant"
    warmup = f", warmup_steps: {steps}" if "LinearLR" in parts else ""
    return (
        "A warm-up (torch's LinearLR, of total_iters steps) and what follows it are one section: write "
        f"`policy.scheduler: {{name: {name}{warmup}}}`."
    )


def _observers(value: object) -> str:
    """How to write `value`, a list of observers or the name of one; "" if it has none that are known."""
    names = value if isinstance(value, (list, tuple)) else [value]
    known = [name for name in _OBSERVERS if name in names]
    example = ", ".join(f"{name}: {_OBSERVERS[name]}" for name in known)
    return f"Each observer is a key: write `observers: {{{example}}}`." if known else ""
