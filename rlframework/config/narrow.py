"""Builds the model of one run: each open section is typed by the plugin that its `name` selects."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import Field, ValidationError, create_model

from rlframework.config.base import Section
from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import RunConfig

_Items = tuple[tuple[str, Any], ...]


def narrow(
    sections: Mapping[str, type[Section]],
    backends: Mapping[str, type[Section]],
    chosen: str = "",
    ignored: Mapping[str, str] | None = None,
) -> type[RunConfig]:
    """Return `RunConfig` with the open sections replaced by `sections` and a section under `policy` for each backend.

    A backend's section is required only if it has keys without defaults and the backend is the `chosen` one. A
    backend in `ignored` (name to reason) may have a section, which is not validated. The same arguments return the
    same class, so two configurations with equal content compare equal.
    """
    return _narrow(tuple(sections.items()), tuple(backends.items()), chosen, tuple((ignored or {}).items()))


@lru_cache(maxsize=64)
def _narrow(sections: _Items, backends: _Items, chosen: str, ignored: _Items) -> type[RunConfig]:
    fields: dict[str, Any] = {
        name: (model, ... if RunConfig.model_fields[name].is_required() else Field(default_factory=model))
        for name, model in sections
    }
    fields["policy"] = (narrow_policy(dict(backends), chosen, dict(ignored)), ...)
    return create_model("RunConfig", __base__=RunConfig, __doc__=RunConfig.__doc__, **fields)


def narrow_policy(
    backends: Mapping[str, type[Section]], chosen: str = "", ignored: Mapping[str, str] | None = None
) -> type[PolicyConfig]:
    """Return `PolicyConfig` with a section for each backend."""
    fields: dict[str, Any] = {
        name: (dict[str, Any] | None, Field(None, description=f"ignored: {reason}", exclude=True))
        for name, reason in (ignored or {}).items()
    }
    for name, model in backends.items():
        description = f"settings specific to the backend `{name}`"
        try:
            fields[name] = (model, Field(model(), description=description))
        except ValidationError:
            required = (model, Field(description=description))
            fields[name] = required if name == chosen else (model | None, Field(None, description=description))
    return create_model("PolicyConfig", __base__=PolicyConfig, __doc__=PolicyConfig.__doc__, **fields)
