"""The keys of a plugin's own section for a suite run, validated like a run's configuration.

Unknown keys are never ignored, and missing keys are reported before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, create_model

from rlframework.base.errors import ConfigError
from rlframework.config.problems import raise_problems
from rlframework.config.validate import validate
from rlframework.config.yaml_text import Tree, parse_value
from rlframework.plugins.configure import OPEN_SECTIONS
from rlframework.plugins.types import Record

_SET_BY_SUITE: Mapping[str, frozenset[str]] = {"worker_group": frozenset({"name", "num_workers", "deadlines"})}


def section_of(record: Record, section: Mapping[str, Any], model: type[BaseModel] | None = None) -> BaseModel | None:
    """Validate `section` with the plugin's config model, or with `model`; None for a plugin without keys.

    Raises a `ConfigError` that lists all problems: unknown and missing keys, invalid values, and keys that the suite
    sets.
    """
    kind = record.kind.replace("_", " ")
    place = next((name for name, of in OPEN_SECTIONS.items() if of.kind == record.kind), "")
    if taken := sorted(section.keys() & _SET_BY_SUITE.get(place, {"name"} if place else frozenset())):
        raise ConfigError(f"{', '.join(taken)}: the suite sets this for the {kind} {record.name!r}")
    model = model or record.config_model or (record.section if place else None)
    if model is None:
        if section:
            keys = ", ".join(section)
            raise ConfigError(f"{keys}: the {kind} {record.name!r} has no section of its own, so this would be ignored")
        return None
    name = place or record.name
    holder: type[BaseModel] = create_model("Configuration", **{name: (model, ...)})  # type: ignore[call-overload]
    values = {**({"name": record.name} if place else {}), **plain_paths(section)}
    config, problems = validate(Tree({name: values}), holder)
    raise_problems(problems)
    checked: BaseModel = getattr(config, name)
    return checked


def plain_paths(section: Mapping[str, Any]) -> dict[str, Any]:
    """Convert paths to text, as in YAML."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in section.items()}


def parse_section(keys: Sequence[str]) -> dict[str, Any]:
    """Parse keys such as `a=1 b.c=x`: dots descend into nested sections, values are YAML."""
    section: dict[str, Any] = {}
    for key, equals, text in (word.partition("=") for word in keys):
        if not equals or not all(key.split(".")):
            raise ConfigError(f"{key + equals + text!r} is not a key of the plugin's own section: write key=value")
        *outer, last = key.split(".")
        inside = section
        for name in outer:
            inside = inside.setdefault(name, {})
            if not isinstance(inside, dict):
                raise ConfigError(f"{key!r}: {name!r} has a value already")
        inside[last] = parse_value(text, f"{key}=")
    return section


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two sections recursively; `above` wins."""
    found = dict(below)
    for key, value in above.items():
        inside = found.get(key)
        found[key] = merged(inside, value) if isinstance(inside, Mapping) and isinstance(value, Mapping) else value
    return found


def section_words(section: Mapping[str, Any]) -> list[str]:
    """Return `section` as words for `parse_section`, one per value: `zero_optimization.stage=3`."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in _values(section, "")]


def _values(section: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _values(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
