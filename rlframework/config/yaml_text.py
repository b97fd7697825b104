"""Reads and writes YAML: values with the line each was written on, and errors that name file, line and column.

Scalars follow YAML 1.2, because PyYAML's 1.1 rules surprise people: only `true` and `false` are booleans (not `no` or
`on`), `1e-6` is a number, dates are strings, and `1:30` and `010` are not base-60 and octal numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlframework.errors import ConfigError

Keys = tuple[str | int, ...]
"""The location of a value: mapping keys and list indices from the top."""


@dataclass
class Layer:
    """One configuration source: its values, and where each was written (such as `run.yaml:3`)."""

    tree: dict[str, Any]
    origins: dict[Keys, str] = field(default_factory=dict)


_FLOAT = (
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_RESOLVERS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:int", r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$", "-+0123456789"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+0123456789."),
    ("tag:yaml.org,2002:merge", r"^(?:<<)$", "<"),
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
)


class _Loader(yaml.SafeLoader):
    """`SafeLoader` with the resolvers above."""


class _Dumper(yaml.SafeDumper):
    """`SafeDumper` that quotes strings which `_Loader` would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        """Repeat equal objects instead of writing anchors."""
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Escape Unicode-only line breaks, which PyYAML would read back as spaces."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _RARE_BREAKS.search(text) else None)


_RARE_BREAKS = re.compile("[\x85\u2028\u2029]")
_Dumper.add_representer(str, _represent_text)
_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(_pattern), ["" if c == "\0" else c for c in _first])


def read_yaml(path: Path) -> Layer:
    """Read the mapping in a file. Raises `ConfigError` if the file is missing, unreadable or not a YAML mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"configuration file not found: {path}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a UTF-8 text file: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Layer:
    """Parse the mapping in `text`; `name` identifies its source in messages and origins."""
    tree, origins = _parse(text, name)
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{name}: a configuration must be a mapping of keys to values, not a {type(tree).__name__}")
    return Layer(tree or {}, origins)


def parse_value(text: str, name: str) -> Any:
    """Parse a single YAML value, such as the right-hand side of an override."""
    return _parse(text, name)[0]


def to_yaml(data: Any) -> str:
    """Return YAML that `parse_yaml` reads back to the same values."""
    text: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120
    )
    return text


def _parse(text: str, name: str) -> tuple[Any, dict[Keys, str]]:
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, {}
            origins = {keys: f"{name}:{line}" for keys, line in _places(node, (), name, ())}
            return loader.construct_document(node), origins
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_message(error, name)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _syntax_message(error: yaml.MarkedYAMLError, name: str) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    snippet = mark.get_snippet() if mark else None
    context = f" ({error.context})" if error.context else ""
    message = f"{place}: not valid YAML: {error.problem}{context}"
    return f"{message}\n{snippet}" if snippet else message


def _places(node: yaml.Node, keys: Keys, name: str, above: tuple[int, ...]) -> Iterator[tuple[Keys, int]]:
    """Yield every location under `node` with its line (from 1). Duplicate and non-string keys are errors."""
    if id(node) in above:
        raise ConfigError(f"{name}:{node.start_mark.line + 1}: this YAML anchor contains itself")
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*keys, index), item.start_mark.line + 1
            yield from _places(item, (*keys, index), name, above)
    elif isinstance(node, yaml.MappingNode):
        yield from _places_in_mapping(node, keys, name, above)


def _places_in_mapping(
    node: yaml.MappingNode, keys: Keys, name: str, above: tuple[int, ...]
) -> Iterator[tuple[Keys, int]]:
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag == "tag:yaml.org,2002:merge":
            merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for part in merged:
                yield from _places(part, keys, name, above)
            continue
        if key.tag != "tag:yaml.org,2002:str":
            shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            raise ConfigError(f"{name}:{line}: keys must be strings, not {shown}; put the key in quotes")
        if key.value in seen:
            dotted = ".".join(str(part) for part in (*keys, key.value))
            raise ConfigError(f"{name}:{line}: duplicate key `{dotted}`, first given on line {seen[key.value]}")
        seen[key.value] = line
        yield (*keys, key.value), line
        yield from _places(value, (*keys, key.value), name, above)
