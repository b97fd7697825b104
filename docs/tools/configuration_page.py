"""`reference/configuration.md`: every key of a configuration, from the JSON schema that `rlframework schema` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pieces import page as page_of
from pieces import table

from rlframework.config.further_policies import FURTHER_POLICIES
from rlframework.config.policy import PolicyConfig
from rlframework.plugins.configure import config_schema
from rlframework.plugins.manager import PluginManager, create_manager
from rlframework.plugins.types import RECORD_TYPES

ROOT = Path(__file__).resolve().parents[2]
Schema = Mapping[str, Any]

_INTERPOLATION = "#/$defs/interpolation"
_TEXT = """Every key with its type, default and meaning, from `rlframework schema`, for the parts that come
with rlframework; that command also covers other installed plugins. [Configuration files](../configuration.md)
explains files, overrides and interpolation, and `rlframework config FILE` prints a run with every default.

The default `(none)` marks a required key, `null` means no value, and `as there` refers to the defaults of its section.
Any key accepts an interpolation `${a.b}`."""
_OTHERS = {"policy.deepspeed": "DeepSpeed's own key, passed through"}
OURS = {"rlframework-core", *(f"rlframework-{path.parent.name}" for path in ROOT.glob("plugins/*/pyproject.toml"))}
"""Distributions of this repository, whose keys are on the page."""
_ORDER = ("algorithm", "environment", "policy", "generation", "worker_group")
_SHARED = "grpo"
"""The algorithm whose keys several others have."""


@dataclass(frozen=True)
class Part:
    """A section of the configuration: its path, its schema, and the part's name if there are several.

    `of`: the name of the part that the section belongs to.
    """

    path: str
    schema: Schema
    name: str = ""
    of: str = ""

    @property
    def title(self) -> str:
        """The heading."""
        with_name = f" with `name: {self.name}`" if self.name else ""
        return f"`{self.path}`{with_name}" + (f", of `{self.of}`" if self.of else "")

    @property
    def anchor(self) -> str:
        """The anchor of the heading."""
        words = self.title.lower().replace(" ", "-")
        return "".join(letter for letter in words if letter.isalnum() or letter in "-_")


def page() -> str:
    """Return the page."""
    schema = config_schema(_manager())
    definitions = {**schema["$defs"]}
    for model in FURTHER_POLICIES.values():
        definitions[model.__name__] = _own(definitions[model.__name__], definitions[PolicyConfig.__name__])
    properties: Schema = schema["properties"]
    first = Part("", schema)
    keys = {key: value for key, value in properties.items() if not _objects(value, definitions)}
    keys["defaults"] = {**keys["defaults"], "default": []}
    parts = [
        "# Configuration reference",
        _TEXT,
        "## The run",
        _keys(Part("", {**schema, "properties": keys}), definitions),
    ]
    names = [*_ORDER, *(key for key in properties if key not in _ORDER)]
    found = [part for key in names for part in _parts(first, key, properties[key], definitions)]
    shared = next(part for part in found if part.name == _SHARED)
    sections = [
        section
        for part in found
        for section in (_sections(part, definitions, 2) if not _alike(part, shared) else [_as_shared(part, shared)])
    ]
    return page_of(*parts, *sections)


def _own(section: Schema, policy: Schema) -> Schema:
    """The schema of a further policy with only the keys that it does not share with `policy`."""
    keys = {key: value for key, value in section["properties"].items() if policy["properties"].get(key) != value}
    keys["worker_group"] = {"type": "object", "default": None, "description": keys["worker_group"]["description"]}
    shared = (
        "It also has the keys of [`policy`](#policy), whose values there are the defaults here "
        "([Further policies](../further_policies.md))."
    )
    return {**section, "properties": keys, "description": f"{section['description']}\n\n{shared}"}


def _alike(part: Part, other: Part) -> bool:
    """Whether `part` is another part with the same keys as `other`."""
    keys = [{**each.schema["properties"], "name": None} for each in (part, other)]
    return part is not other and keys[0] == keys[1]


def _as_shared(part: Part, shared: Part) -> str:
    link = "../algorithms/" + part.name.removesuffix("_baseline") + ".md"
    return f"## {part.title}\n\nThe keys of [`{shared.name}`](#{shared.anchor}), with [defaults of its own]({link})."


def _manager() -> PluginManager:
    """Return a manager with only the distributions of rlframework, even if others are installed."""
    every = create_manager(disabled=())
    kinds = list(RECORD_TYPES)
    found = {part.distribution for kind in kinds for part in every.registered(kind).values()}
    return create_manager(disabled=sorted(found - OURS))


def _sections(part: Part, definitions: Schema, level: int) -> Iterator[str]:
    """Yield the section `part` and its subsections."""
    texts = [f"{'#' * level} {part.title}", part.schema.get("description", ""), _keys(part, definitions)]
    yield "\n\n".join(filter(None, texts))
    for key, value in part.schema["properties"].items():
        for inner in _parts(part, key, value, definitions):
            yield from _sections(inner, definitions, min(level + 1, 4))


def _parts(outer: Part, key: str, value: Schema, definitions: Schema) -> Iterator[Part]:
    """Yield the possible sections of `key` in `outer`."""
    path = f"{outer.path}.{key}" if outer.path else key
    objects = _objects(value, definitions)
    for schema in objects:
        named = schema["properties"].get("name", {})
        (only,) = [choice.get("const") for choice in _choices(named) if "const" in choice] or [None]
        own = "name" in schema["properties"] and only is None and schema.get("additionalProperties") is True
        name = str(only or ("module:name" if own else "")) if len(objects) > 1 or path in _ORDER else ""
        yield Part(path, schema, name, outer.of or outer.name)


def _objects(value: Schema, definitions: Schema) -> list[Schema]:
    """Return the object schemas that `value` accepts."""
    found = [definitions[choice["$ref"].rpartition("/")[2]] for choice in _choices(value) if "$ref" in choice]
    return [schema for schema in found if "properties" in schema]


def _choices(value: Schema) -> list[Schema]:
    choices = value.get("anyOf", [value])
    return [choice for choice in choices if choice.get("$ref") != _INTERPOLATION]


def _keys(part: Part, definitions: Schema) -> str:
    rows = []
    for key, value in part.schema["properties"].items():
        inner = list(_parts(part, key, value, definitions))
        rows.append(
            (f"`{key}`", _type(value, inner, definitions), _default(value, inner), _meaning(part, value, inner))
        )
    return table(("key", "type", "default", "meaning"), rows)


def _meaning(part: Part, value: Schema, inner: list[Part]) -> str:
    text = str(value.get("description", "")) or (str(inner[0].schema.get("description", "")) if inner else "")
    if not text:
        text = next((said for path, said in _OTHERS.items() if part.path.startswith(path)), "")
    return _cell(text.partition("\n\n")[0])


def _type(value: Schema, inner: list[Part], definitions: Schema) -> str:
    links = [f"[section](#{part.anchor})" for part in inner]
    others = [_word(choice) for choice in _choices(value) if "$ref" not in choice]
    plain = [
        _word(definitions[choice["$ref"].rpartition("/")[2]])
        for choice in _choices(value)
        if "$ref" in choice and not _objects(choice, definitions)
    ]
    return _cell(" or ".join(dict.fromkeys(word for word in [*links, *plain, *others] if word)))


def _word(schema: Schema) -> str:
    """Describe a type."""
    if "const" in schema:
        return f"`{_shown(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{_shown(item)}`" for item in schema["enum"])
    kind = schema.get("type", "anything")
    if kind in ("integer", "number"):
        return " ".join(filter(None, ["whole number" if kind == "integer" else "number", _range(schema)]))
    if kind == "array":
        if "prefixItems" in schema:
            return "list of " + ", ".join(_word(item) for item in schema["prefixItems"])
        return f"list of {_word(schema.get('items', {}))}"
    if kind == "object":
        return f"map to {_word(values)}" if isinstance(values := schema.get("additionalProperties"), dict) else "map"
    if kind == "string":
        return {"path": "path"}.get(
            str(schema.get("format")), "import path" if schema.get("pattern") == ":" else "text"
        )
    return {"boolean": "`true`, `false`", "null": "`null`"}.get(str(kind), str(kind))


def _range(schema: Schema) -> str:
    if schema.get("type") == "integer" and "exclusiveMinimum" in schema:
        schema = {"minimum": schema["exclusiveMinimum"] + 1, **schema, "exclusiveMinimum": None}
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    bounds = {word: schema[key] for key, word in words.items() if schema.get(key) is not None}
    return " ".join(f"{word} {bound:g}" if bound % 1 else f"{word} {int(bound):,}" for word, bound in bounds.items())


def _default(value: Schema, inner: list[Part]) -> str:
    if "default" not in value:
        return "`null`" if any(choice.get("type") == "null" for choice in _choices(value)) else "(none)"
    default = value["default"]
    return "as there" if inner and isinstance(default, dict) else f"`{_cell(_shown(default))}`"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value and "\n" not in value else json.dumps(value)


def _cell(text: str) -> str:
    """`text` on one line."""
    return " ".join(text.split())
