"""What the tests of several pages share; `probe_shell`, which serves two files, is put on the import path."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlframework.configure import config_schema
from rlframework.plugins.manager import create_manager

FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:
    sys.path.append(FOLDER)


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
