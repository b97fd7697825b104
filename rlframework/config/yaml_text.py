"""Reads and writes YAML: values with the line each was written on, and errors that name file, line and column.

`OmegaConf.load` keeps no lines, and reads by YAML 1.1, as PyYAML does: `no` and `on` are booleans, `1:30` is 90, `010`
is 8. Here scalars follow YAML 1.2: only `true` and `false` are booleans, `1e-6` is a number, and those are strings.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlframework.base.errors import ConfigError
from rlframework.base.secrets import hide_in_text
from rlframework.config.problems import NOT_GIVEN, shortened

Keys = tuple[str | int, ...]
"""The location of a value: mapping keys and list indices from the top."""


@dataclass
class Tree:
    """A configuration, or a part of it, before validation: plain values, and where each was written (`run.yaml:3`).

    `overridden` has the keys that the command line gave a value.
    """

    values: dict[str, Any]
    origins: dict[Keys, str] = field(default_factory=dict)
    overridden: frozenset[Keys] = frozenset()

    def get(self, keys: Keys) -> Any:
        """Return the value at `keys`; `NOT_GIVEN` if there is none."""
        found: Any = self.values
        for key in keys:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                return NOT_GIVEN
        return found

    def with_values(self, values: Mapping[str, Any]) -> Tree:
        """Return a copy in which the dotted keys of `values` have these values."""
        changed = copy.deepcopy(self.values)
        for key, value in values.items():
            *sections, last = key.split(".")
            target = changed
            for section in sections:
                target = target.setdefault(section, {})
            target[last] = value
        return Tree(changed, self.origins, self.overridden)

    def origin(self, keys: Keys) -> str:
        """Where the value at `keys` was written; empty if it is a default or its origin is unknown."""
        if self.get(keys) is NOT_GIVEN:
            return ""
        known = (self.origins.get(keys[:length], "") for length in range(len(keys), 0, -1))
        return next(filter(None, known), "")


_SURROGATES = re.compile("[\ud800-\udfff]")
_RARE_BREAKS = re.compile("[\x85\u2028\u2029]")
_SCALARS = {
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)",
    "float": r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "merge": r"<<",
    "null": r"~|null|Null|NULL|",
}


_TAG = "tag:yaml.org,2002:"
LARGEST, DEEPEST, LONGEST = 100_000, 64, 10_000_000
"""The most values of a text, with each alias written out, levels of nesting, and characters of a file."""


class _Loader(yaml.SafeLoader):
    """`SafeLoader` with the scalars above, and no other types than JSON has."""


class _Dumper(yaml.SafeDumper):
    """`SafeDumper` that quotes strings which `_Loader` would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        """Repeat equal objects instead of writing anchors."""
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Escape Unicode-only line breaks, which PyYAML would read back as spaces."""
    return dumper.represent_scalar(f"{_TAG}str", text, style='"' if _RARE_BREAKS.search(text) else None)


_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix(_TAG) in {*_SCALARS, "str", "seq", "map"}
}
_Dumper.add_representer(str, _represent_text)
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern in _SCALARS.items():
        _class.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(f"(?:{_pattern})$"), None)


def read_yaml(path: Path) -> Tree:
    """Read the mapping in a file. Raises `ConfigError` if the file is missing, unreadable or not a YAML mapping."""
    if path.suffix == ".py":
        raise ConfigError(
            f"{path} is a Python script, not a configuration, which is a YAML file: run it with `python {path}`"
        )
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)  # a device such as /dev/zero has no end
    except FileNotFoundError:
        beside = {other.stem: other.name for other in path.parent.glob("*.y*ml")}
        near = difflib.get_close_matches(path.stem, beside, n=1)
        hint = f". Did you mean {beside[near[0]]!r}?" if near else ""
        raise ConfigError(f"configuration file not found: {path}{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a UTF-8 text file: {error.reason} at byte {error.start}") from None
    except (OSError, ValueError) as error:  # a ValueError for a NUL character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the configuration file {shortened(str(path), 500)!r}: {reason}") from error
    if len(text) > LONGEST:
        raise ConfigError(f"{path}: a configuration has at most {LONGEST:,} characters")
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Tree:
    """Parse the mapping in `text`; `name` identifies its source in messages and origins."""
    tree, origins = _parse(text, name)
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{name}: a configuration must be a mapping of keys to values, not a {type(tree).__name__}")
    return Tree(tree or {}, origins)


def parse_value(text: str, name: str) -> Any:
    """Parse a single YAML value, such as the right-hand side of an override."""
    return _parse(text, name)[0]


def to_yaml(data: Any) -> str:
    """Return YAML that `parse_yaml` reads back to the same values."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def _parse(text: str, name: str) -> tuple[Any, dict[Keys, str]]:
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return None, {}
        _check(node, name, {}, ())
        origins = {keys: f"{name}:{line}" for keys, line in _places(node, (), name)}
        return _Loader("").construct_document(node), origins
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        context = f" ({error.context})" if error.context else ""
        snippet = f"\n{mark.get_snippet()}" if mark else ""
        lines = "\n".join(text.split("\n")[max(mark.line - 1, 0) : mark.line + 1]) if mark else ""
        if hide_in_text(lines) != lines:  # the message would have parts of a secret, without its name
            raise ConfigError(f"{place}: not valid YAML; put the value in quotes") from None
        raise ConfigError(f"{place}: not valid YAML: {error.problem}{context}{snippet}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested more than {DEEPEST} levels deep") from None


def _check(node: yaml.Node, name: str, known: dict[yaml.Node, int], above: tuple[yaml.Node, ...]) -> int:
    """Return the number of values under `node`, with aliases written out, before anything writes them out.

    `known` has those of the nodes that were counted. Raises `ConfigError` for what is too large or too deep, for an
    anchor that contains itself, and for a scalar with a tag that its text does not fit.
    """
    place = f"{name}:{node.start_mark.line + 1}"
    if node in above:
        raise ConfigError(f"{place}: this YAML anchor contains itself")
    if len(above) > DEEPEST:
        raise ConfigError(f"{place}: nested more than {DEEPEST} levels deep")
    if node in known:
        return known[node]
    pattern = _SCALARS.get(node.tag.removeprefix(_TAG)) if isinstance(node, yaml.ScalarNode) else None
    if pattern and not re.fullmatch(pattern, node.value):
        raise ConfigError(f"{place}: not valid YAML: {node.value!r} is not a {node.tag.removeprefix(_TAG)}")
    if isinstance(node, yaml.ScalarNode) and _SURROGATES.search(node.value):
        raise ConfigError(f"{place}: {shortened(node.value)!a} has half of a pair of \\u escapes, which is not text")
    items = node.value if isinstance(node, yaml.CollectionNode) else ()
    parts = [part for item in items for part in (item if isinstance(node, yaml.MappingNode) else (item,))]
    count = 1 + sum(_check(part, name, known, (*above, node)) for part in parts)
    if count > LARGEST:
        raise ConfigError(f"{place}: more than {LARGEST:,} values, with each YAML alias written out")
    known[node] = count
    return count


def _places(node: yaml.Node, keys: Keys, name: str) -> Iterator[tuple[Keys, int]]:
    """Yield every location under `node` with its line (from 1). Duplicate and non-string keys are errors."""
    seen: dict[str, int] = {}
    for index, item in enumerate(node.value if isinstance(node, yaml.CollectionNode) else ()):
        key, value = item if isinstance(node, yaml.MappingNode) else (item, item)
        line, inside = key.start_mark.line + 1, (*keys, index)
        if isinstance(node, yaml.MappingNode):
            if key.tag == f"{_TAG}merge":
                for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    yield from _places(part, keys, name)
                continue
            if key.tag != f"{_TAG}str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise ConfigError(f"{name}:{line}: keys must be strings, not {shown}; put the key in quotes")
            inside = (*keys, key.value)
            if key.value in seen:
                dotted = ".".join(map(str, inside))
                raise ConfigError(f"{name}:{line}: duplicate key `{dotted}`, first given on line {seen[key.value]}")
            seen[key.value] = line
        yield inside, line
        yield from _places(value, inside, name)
