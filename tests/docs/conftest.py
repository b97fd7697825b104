"""Fixtures that the tests of several pages share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from rlframework.plugins.configure import config_schema
from rlframework.plugins.manager import create_manager


def paths(schema: Mapping[str, Any], definitions: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The dotted keys of `schema`."""
    for choice in [schema, *schema.get("anyOf", [])]:
        target = definitions[choice["$ref"].rpartition("/")[2]] if "$ref" in choice else choice
        for key, value in target.get("properties", {}).items():
            yield f"{above}{key}"
            yield from paths(value, definitions, f"{above}{key}.")


@pytest.fixture(scope="session")
def keys():
    """Every key of a configuration, with dots."""
    schema = config_schema(create_manager())
    return set(paths(schema, schema["$defs"]))
