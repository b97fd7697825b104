"""The JSON Schema (2020-12) of a configuration file, for editors that complete and check YAML.

An open section accepts the keys of any installed plugin, distinguished by `name`. No key is required, because a file
may inherit the rest, and the value of any key may be an interpolation `${a.b}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Union

from pydantic import ConfigDict, Field, create_model
from pydantic.json_schema import GenerateJsonSchema

from rlframework.config.base import Section
from rlframework.config.narrow import narrow_policy
from rlframework.config.sections import EnvironmentConfig, RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Models = Mapping[str, type[Section]]
"""Plugin name to the model of its section."""

_INTERPOLATION = "interpolation"
_ANNOTATIONS = ("title", "description", "default")
_DEFAULTS = {
    "description": "files to inherit from, relative to this one; later ones and then this file take precedence",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def run_schema(sections: Mapping[str, Models], backends: Models) -> dict[str, Any]:
    """Return the schema for the given plugins: `sections` by open section, `backends` for those under `policy`."""
    fields: dict[str, Any] = {
        section: (
            _any_of(models),
            Field(None, description=RunConfig.model_fields[section].annotation.__doc__),
        )
        for section, models in sections.items()
        if models
    }
    if "environment" in fields:
        models, info = fields["environment"]
        fields["environment"] = (models | _OwnEnvironment, info)
    policy = narrow_policy(backends)
    fields["policy"] = (policy, Field(None, description=policy.__doc__))
    model = create_model("RunConfig", __base__=RunConfig, **fields)
    schema = model.model_json_schema(schema_generator=_ForFiles)
    for part in (schema, *schema["$defs"].values()):
        if "properties" in part:
            part["properties"] = {name: _or_interpolation(value) for name, value in part["properties"].items()}
    schema["properties"]["defaults"] = _DEFAULTS
    definitions = {**schema.pop("$defs"), _INTERPOLATION: {"type": "string", "pattern": r"\$\{"}}
    head = {"$schema": DIALECT, "title": "rlframework", "description": "A run of rlframework."}
    return {**schema, **head, "$defs": definitions}


class _OwnEnvironment(EnvironmentConfig):
    """Your own class, named by its import path. All other keys are those of its `config_model`."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=":", description="import path `module:Class`")


def _any_of(models: Models) -> Any:
    """The union of the models, each restricted to its own `name`."""
    return Union[tuple(_named(name, model) for name, model in sorted(models.items()))]  # noqa: UP007


def _named(name: str, model: type[Section]) -> type[Section]:
    info = model.model_fields["name"]
    only: Any = (Literal[name], Field(name, description=info.description))
    return create_model(f"{model.__name__}_{name}", __base__=model, __doc__=model.__doc__, name=only)


class _ForFiles(GenerateJsonSchema):
    """Requires no key, because a file may inherit the rest."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        """Return False."""
        return False


def _or_interpolation(schema: dict[str, Any]) -> dict[str, Any]:
    outside = {key: schema[key] for key in _ANNOTATIONS if key in schema and schema[key] is not None}
    inside = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    if inside == {"type": "string"}:
        return {**outside, **inside}
    choices = inside["anyOf"] if set(inside) == {"anyOf"} else [inside]
    return {**outside, "anyOf": [*choices, {"$ref": f"#/$defs/{_INTERPOLATION}"}]}
