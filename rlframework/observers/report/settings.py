"""Flattens configurations and environments to dotted keys and short texts, and hides secrets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rlframework.observers.secrets import hide_secrets

KEYS, LONGEST = 5000, 2000


def flatten(values: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Flatten `{"a": {"b": 1}}` to `{"a.b": "1"}`, at most `KEYS` keys. None stays None.

    Items with a `name` become keys: `{"gpus": [{"name": "x", "cores": 2}]}` is flattened to `{"gpus.x": "2"}`.
    """
    return None if values is None else dict(islice(_walk(hide_secrets(values), ""), KEYS))


def environment_of(values: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Flatten an environment; of the environments before a resume, keep only the start times."""
    if values is None:
        return None
    earlier: Any = values.get("earlier") if _is_list(values.get("earlier")) else ()
    starts = [_text(one.get("started")) for one in earlier if isinstance(one, Mapping)]
    found = flatten({name: value for name, value in values.items() if name != "earlier"}) or {}
    return {**found, "earlier starts": ", ".join(starts)} if starts else found


def lookup(values: Mapping[str, Any] | None, dotted: str) -> Any:
    """The value at a dotted key such as `a.b`; None if there is none."""
    found: Any = values
    for name in dotted.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _walk(values: Mapping[Any, Any], before: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        key = f"{before}{name}"
        if isinstance(value, Mapping) and value:
            yield from _walk(value, f"{key}.")
        elif _is_list(value) and value and all(isinstance(one, Mapping) and "name" in one for one in value):
            yield from _walk_named(value, f"{key}.")
        elif key.endswith("_bytes") and isinstance(value, (int, float)):
            yield key, f"{value / 2**30:,.1f} GiB"
        else:
            yield key, _text(value)


def _walk_named(values: Sequence[Mapping[str, Any]], before: str) -> Iterator[tuple[str, str]]:
    for index, value in enumerate(values):
        twin = any(other["name"] == value["name"] for other in values[:index])
        rest = dict(_walk({name: one for name, one in value.items() if name != "name"}, ""))
        yield f"{before}{value['name']}" + (f" ({index})" if twin else ""), " ".join(rest.values())


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _text(value: Any) -> str:
    text = value if isinstance(value, str) and value.strip() else json.dumps(value, default=str)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
