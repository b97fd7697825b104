"""The model of one run, and the JSON Schema of configuration files: both made of the models of plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union

from pydantic import ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from rlframework.config.base import Section
from rlframework.config.further_policies import FURTHER_POLICIES, FurtherPolicyConfig
from rlframework.config.policy import BatchingConfig, PolicyConfig, WorkerGroupConfig
from rlframework.config.sections import AlgorithmConfig, EnvironmentConfig, RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Model = TypeVar("Model", bound=Section)
Models = tuple[tuple[str, type[Section]], ...]
"""Names and the models that belong to them."""

_INTERPOLATION = "interpolation"
_ANNOTATIONS = ("title", "description", "default")
_DEFAULTS = {
    "description": "files to inherit from, relative to this one; later ones and then this file take precedence",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


@lru_cache(maxsize=64)
def run_model(
    sections: Models,
    backends: Models,
    chosen: str = "",
    ignored: tuple[tuple[str, str], ...] = (),
    further: tuple[tuple[str, str, type[Section], type[Section]], ...] = (),
    batching: type[Section] = BatchingConfig,
) -> type[RunConfig]:
    """Return `RunConfig` with the open sections replaced by `sections` and a section under `policy` for each backend.

    `further` has the sections of further policies that are given: name, backend, and the models of the worker group and
    of `batching`. `batching`: the model of `policy.batching`.

    A backend's section is required only if it has keys without defaults and the backend is the `chosen` one. A
    backend in `ignored` (name and reason) may have a section, which is not validated. The same arguments return the
    same class, so two configurations with equal content compare equal.
    """
    fields: dict[str, Any] = {
        name: (model, ... if RunConfig.model_fields[name].is_required() else Field(default_factory=model))
        for name, model in sections
    }
    for name, backend, group, own_batching in further:
        model = _policy_model(backends, backend, ignored, FURTHER_POLICIES[name], own_batching)
        fields[name] = (_with_fields(model, {"worker_group": (group, Field(default_factory=group))}), ...)
    fields["policy"] = (_policy_model(backends, chosen, ignored, batching=batching), ...)
    return _with_fields(RunConfig, fields)


def run_schema(
    sections: Mapping[str, Models], backends: Models, batching: Sequence[type[Section]] = (BatchingConfig,)
) -> dict[str, Any]:
    """Return the schema for the given plugins: `sections` by open section, `backends` for those under `policy`.

    `batching`: the models that `policy.batching` may have.

    An open section accepts the keys of any of its models, distinguished by `name`. No key is required, because a file
    may inherit the rest, and the value of any key may be an interpolation `${a.b}`.
    """
    union: Any = Union[tuple(batching)]  # noqa: UP007
    described = PolicyConfig.__doc__
    fields: dict[str, Any] = {"policy": (_policy_model(backends, batching=union), Field(None, description=described))}
    for section, models in sections.items():
        choices = [_named(name, model) for name, model in sorted(models)]
        if choices:
            choices += [_OWN[section]] if section in _OWN else []
            described = RunConfig.model_fields[section].annotation.__doc__
            fields[section] = (Union[tuple(choices)], Field(None, description=described))  # noqa: UP007
    groups = fields.get("worker_group", (WorkerGroupConfig,))[0]
    for name, base in FURTHER_POLICIES.items():
        described = FurtherPolicyConfig.model_fields["worker_group"].description
        group = (groups | None, Field(None, description=described))
        model = _with_fields(_policy_model(backends, base=base, batching=union), {"worker_group": group})
        fields[name] = (model | None, Field(None, description=base.__doc__))
    schema = _with_fields(RunConfig, fields).model_json_schema(schema_generator=_ForFiles)
    for part in (schema, *schema["$defs"].values()):
        if "properties" in part:
            part["properties"] = {name: _or_interpolation(value) for name, value in part["properties"].items()}
            if part.get("additionalProperties") is False:
                part["patternProperties"] = {"^~": {"type": "null"}}  # removes an inherited key
    schema["properties"]["defaults"] = _DEFAULTS
    definitions = {**schema.pop("$defs"), _INTERPOLATION: {"type": "string", "pattern": r"\$\{"}}
    head = {"$schema": DIALECT, "title": "rlframework", "description": "A run of rlframework."}
    return {**schema, **head, "$defs": definitions}


def _policy_model(
    backends: Models,
    chosen: str = "",
    ignored: tuple[tuple[str, str], ...] = (),
    base: type[PolicyConfig] = PolicyConfig,
    batching: type[Section] = BatchingConfig,
) -> type[PolicyConfig]:
    fields: dict[str, Any] = {
        name: (dict[str, Any] | None, Field(None, description=f"ignored: {reason}", exclude=True))
        for name, reason in ignored
    }
    if batching is not BatchingConfig:
        default = batching() if isinstance(batching, type) else BatchingConfig()
        fields["batching"] = (batching, default)
    for name, model in backends:
        description = f"settings specific to the backend `{name}`"
        try:
            fields[name] = (model, Field(model(), description=description))
        except ValidationError:
            required = (model, Field(description=description))
            fields[name] = required if name == chosen else (model | None, Field(None, description=description))
    return _with_fields(base, fields)


def _with_fields(base: type[Model], fields: Mapping[str, Any], name: str = "") -> type[Model]:
    return create_model(name or base.__name__, __base__=base, __doc__=base.__doc__, **fields)


class _OwnEnvironment(EnvironmentConfig):
    """Your own class, named by its import path. All other keys are those of its `config_model`."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=":", description="import path `module:Class`")


class _OwnAlgorithm(AlgorithmConfig):
    """Your own class, named by its import path. All other keys are those of its `config_model`."""

    # without the name, a misspelled key of any algorithm in a file that inherits it would fit this one
    model_config = ConfigDict(extra="allow", json_schema_extra={"required": ["name"]})

    name: str = Field(pattern=":", description="import path `module:Class`")


_OWN: Mapping[str, type[Section]] = {"environment": _OwnEnvironment, "algorithm": _OwnAlgorithm}
"""The open sections that take an import path, with what the schema says of them."""


def _named(name: str, model: type[Section]) -> type[Section]:
    """`model`, restricted to its own `name`."""
    only = (Literal[name], Field(name, description=model.model_fields["name"].description))
    return _with_fields(model, {"name": only}, f"{model.__name__}_{name}")


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
