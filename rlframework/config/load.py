"""Composes files and overrides into one tree of plain values: inheritance, merging, dotted overrides, interpolation.

This module does not interpret the keys; `rlframework.plugins.configure` validates the result.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, TypeAlias, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, UnsupportedInterpolationType
from pydantic import BaseModel

from rlframework.base.errors import ConfigError
from rlframework.base.secrets import HIDDEN, is_secret_name
from rlframework.config.base import import_path
from rlframework.config.problems import Problem, raise_problems, shortened
from rlframework.config.yaml_text import DEEPEST, Keys, Tree, parse_value, read_yaml

INHERIT = "defaults"
"""The top-level key that names the files to inherit from."""

_KEY = re.compile(r"[\w-]+(\.[\w-]+)*")
_REFERENCE = re.compile(r"\$\{(\.*)([^${}:]+)\}")
_FUNCTION = re.compile(r"(?<!\\)\$\{\s*([\w.]+)\s*:")
_LONGEST = 1_000_000
"""The most characters of a configuration after interpolation."""
_BEFORE_INTERPOLATION = re.compile(r"(\\*)\$\{")


Source: TypeAlias = str | Path | Mapping[str, Any] | BaseModel | Tree
"""A configuration: a file, a mapping, a resolved configuration, or what `compose` returned."""


def compose(source: Source, overrides: Sequence[str] = ()) -> Tree:
    """Merge and interpolate `source` and `overrides`.

    Later layers override earlier ones: first the files in `defaults: [a.yaml, b.yaml]`, in order (paths are relative
    to the file, or to the working directory for a mapping); then the source itself, where `~b:` removes the inherited
    key `b`; then the overrides, `a.b=value` with the value in YAML, or `~a.b` to remove a key. Mappings are merged,
    everything else is replaced. `${a.b}` is replaced by the value of another key.
    """
    merged = OmegaConf.create({})
    origins: dict[Keys, str] = {}
    overridden = set[Keys]()
    try:
        for layer in _layers(source):
            _remove_marked(merged, layer, layer.values, origins)
            _remove_replaced(merged, layer.values)
            merged.merge_with(OmegaConf.create(layer.values))
            origins.update(layer.origins)
            overridden |= layer.overridden
        for override in (overrides,) if isinstance(overrides, str) else overrides:
            overridden |= _apply(merged, override, origins)
        _interpolated_length(given := OmegaConf.to_container(merged), (), given, {})
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except UnsupportedInterpolationType as error:
        raise_problems(_unknown_functions(merged, origins))
        raise ConfigError(_omegaconf_message(error, origins)) from None
    except OmegaConfBaseException as error:
        raise ConfigError(_omegaconf_message(error, origins)) from None
    except RecursionError:
        raise ConfigError("the configuration cannot be composed: too many values refer to one another") from None
    return Tree(cast("dict[str, Any]", values), origins, frozenset(overridden))


def _interpolated_length(value: Any, place: tuple[str, ...], whole: Any, known: dict[tuple[str, ...], int]) -> int:
    """Return about how many characters the `value` at `place` in `whole` has once each `${a.b}` in it is replaced.

    A few lines that refer to each other can stand for more text than there is memory, so this is computed before
    OmegaConf replaces them. `known` has the lengths of the places that were counted. Raises `ConfigError` for more
    than a configuration may have.
    """
    if place in known:
        return known[place]
    known[place] = 0  # in a circle, which OmegaConf reports
    length = 1
    for key, item in _items(value):
        length += _interpolated_length(item, (*place, key), whole, known)
    if isinstance(value, str):
        length += len(value)
        for dots, name in _REFERENCE.findall(value):
            target = (*(place[: -len(dots)] if dots else ()), *re.split(r"[.\[\]]+", name.strip("[]")))
            found = whole
            for key in target:
                found = dict(_items(found)).get(key)
            length += _interpolated_length(found, target, whole, known)
    if length > _LONGEST:
        dotted = ".".join(place)
        raise ConfigError(f"`{dotted}`: the configuration has more than {_LONGEST:,} characters after interpolation")
    known[place] = length
    return length


def _items(value: Any) -> list[tuple[str, Any]]:
    """The parts of a mapping or list, by the text of their key or index; of anything else, none."""
    if isinstance(value, Mapping):
        return list(value.items())
    return [(str(index), item) for index, item in enumerate(value)] if isinstance(value, list) else []


def escape_interpolation(value: Any, variables: Mapping[str, str] | None = None) -> Any:
    """Escape every `${` in `value`, so that loading it returns the same text.

    `variables`: names of environment variables by their values. `${oc.env:NAME}` replaces these values, so loading
    returns the same text where the environment has them.
    """
    named = {text: name for text, name in (variables or {}).items() if re.fullmatch(r"[A-Za-z_]\w*", name)}
    return _escaped(value, named, re.compile(f"({'|'.join(map(re.escape, named)) or '(?!)'})"))


def _escaped(value: Any, named: Mapping[str, str], pattern: re.Pattern[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _escaped(item, named, pattern) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped(item, named, pattern) for item in value]
    if not isinstance(value, str):
        return value
    text = ""
    for index, part in enumerate(pattern.split(value)):
        if index % 2:  # backslashes before it would escape it
            text = re.sub(r"\\+$", r"\g<0>\g<0>", text) + f"${{oc.env:{named[part]}}}"
        else:
            text += _BEFORE_INTERPOLATION.sub(r"\1\1\\${", part)
    return text


def _layers(source: Source) -> list[Tree]:
    if isinstance(source, Tree):
        return [replace(source, values=escape_interpolation(source.values))]
    if isinstance(source, BaseModel):
        return [Tree(escape_interpolation(source.model_dump(mode="json")))]
    if isinstance(source, Mapping):
        return _with_inherited(Tree(_plain(source, ())), None, ())
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"a configuration is a YAML file, a mapping or a RunConfig, given a {type(source).__name__}")
    return _with_inherited(read_yaml(Path(source)), Path(source), ())


def leaves(value: Any, keys: Keys) -> Iterator[Keys]:
    """The keys of all values within `value` that are not mappings, or of an empty one; `keys` are those of `value`."""
    if not isinstance(value, Mapping) or not value:
        yield keys
        return
    for key, item in value.items():
        yield from leaves(item, (*keys, key))


def _with_inherited(layer: Tree, path: Path | None, above: tuple[Path, ...]) -> list[Tree]:
    """The layers that `layer` inherits from, in order, followed by `layer` without its `defaults`."""
    names = layer.values.pop(INHERIT, None)
    where = layer.origins.get((INHERIT,), "the configuration")
    names = [names] if isinstance(names, str) else (names or [])
    if not isinstance(names, list) or not all(isinstance(name, str) and "\0" not in name for name in names):
        raise ConfigError(f"`defaults` in {where} must be a file name or a list of file names, given {names!r}")
    above = (*above, path.resolve()) if path else above
    layers: list[Tree] = []
    for name in names:
        parent = (path.parent if path else Path()) / name
        if not os.path.isfile(parent):  # `Path.is_file` raises for some names
            shown = shortened(str(parent), 500)
            raise ConfigError(f"configuration file not found: {shown}, listed under `defaults` in {where}")
        if parent.resolve() in above:
            chain = " -> ".join(str(item) for item in (*above, parent.resolve()))
            raise ConfigError(f"`defaults` are circular: {chain}")
        layers += _with_inherited(read_yaml(parent), parent, above)
    return [*layers, layer]


def _apply(merged: DictConfig, override: str, origins: dict[Keys, str]) -> set[Keys]:
    """Change `merged` and `origins`; return the keys that have a value from `override`."""
    removes = override.startswith("~") and "=" not in override
    key, equals, text = (override[1:], "", "") if removes else override.partition("=")
    override = shortened(override, 200)
    if not (removes or equals) or not _KEY.fullmatch(key) or key.count(".") > DEEPEST:
        added = "; a new key is written in the same way, without Hydra's +" if key.startswith("+") else ""
        raise ConfigError(
            f"`{override}` is not a valid override: write `key=value` with a dotted key and a YAML value, "
            f"such as `policy.optimizer.lr=1e-5`, or `~key` to remove a key{added}"
        )
    keys: Keys = tuple(key.split("."))
    if keys[0] == INHERIT:
        raise ConfigError(f"`{override}`: `defaults` cannot be overridden; set it in the file")
    if removes:
        holder = OmegaConf.select(merged, key.rpartition(".")[0]) if len(keys) > 1 else merged
        if not isinstance(holder, DictConfig) or keys[-1] not in holder:
            raise ConfigError(f"`{override}`: there is no key `{key}` to remove")
        del holder[keys[-1]]
        _forget(origins, keys)
        return set()
    value = _value(key, text, override)
    try:
        holder = OmegaConf.select(merged, key.rpartition(".")[0]) if len(keys) > 1 else merged
        if isinstance(holder, DictConfig):
            _remove_replaced(holder, {keys[-1]: value})
        sections = [keys[:length] for length in range(1, len(keys))]
        made = [each for each in sections if OmegaConf.select(merged, ".".join(map(str, each))) is None]
        OmegaConf.update(merged, key, value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"override `{override}`: {_reason(error)}") from None
    except ValueError:  # a name where a list has an index
        raise ConfigError(f"override `{override}`: the items of a list are numbered: `list.0=value`") from None
    keys = tuple(int(part) if str(part).isdigit() else part for part in keys)
    given = set(leaves(value, keys))
    for leaf in given:
        _forget(origins, leaf)
    origins.update(dict.fromkeys([*made, keys, *given], f"override `{override}`"))
    return given


def _value(key: str, text: str, override: str) -> Any:
    try:
        return parse_value(text, f"override `{override}`")
    except ConfigError:
        if is_secret_name(key):  # the message would have parts of the secret
            raise ConfigError(f"override `{key}={HIDDEN}`: not valid YAML; put the value in quotes") from None
        raise


def _forget(origins: dict[Keys, str], keys: Keys) -> None:
    """Remove from `origins` the value at `keys` and those within it."""
    for old in [old for old in origins if old[: len(keys)] == keys]:
        del origins[old]


def _remove_marked(old: Any, layer: Tree, values: dict[Any, Any], origins: dict[Keys, str], above: Keys = ()) -> None:
    """Remove from `old` each key that `values`, those of `layer` at `above`, have with a `~`; and these marks."""
    for mark in [key for key in values if isinstance(key, str) and key.startswith("~")]:
        name, keys = mark[1:], (*above, mark)
        if values.pop(mark) is not None:
            raise ConfigError(f"{_written(layer, keys)} removes a key: write nothing after the colon")
        if not isinstance(old, DictConfig) or name not in old.keys():  # noqa: SIM118 - `in old` resolves values
            raise ConfigError(f"{_written(layer, keys)}: there is no inherited key `{name}` to remove")
        del old[name]
        _forget(origins, (*above, name))
    for key, value in values.items():
        if isinstance(value, dict):
            merges = isinstance(old, DictConfig) and key in old and not OmegaConf.is_interpolation(old, key)
            _remove_marked(old[key] if merges else None, layer, value, origins, (*above, key))


def _written(layer: Tree, keys: Keys) -> str:
    """The dotted key of a mark, and where it was written."""
    origin = layer.origins.get(keys)
    return f"`{'.'.join(map(str, keys))}`" + (f" ({origin})" if origin else "")


def _remove_replaced(old: DictConfig, new: Mapping[Any, Any]) -> None:
    """Remove from `old` each list in whose place `new` has a mapping, and the reverse: OmegaConf merges neither."""
    for key, value in new.items():
        if key not in old.keys() or not isinstance(value, (Mapping, list)):  # noqa: SIM118 - `in old` resolves values
            continue
        if OmegaConf.is_interpolation(old, key):
            if isinstance(value, list):
                del old[key]
            continue
        held = old.get(key)
        if isinstance(held, DictConfig) and isinstance(value, Mapping):
            _remove_replaced(held, value)
        elif isinstance(held, (DictConfig, ListConfig)) and isinstance(held, ListConfig) != isinstance(value, list):
            del old[key]


def _plain(value: Any, keys: Keys) -> Any:
    """Convert models, mappings, tuples and paths to plain values, and functions and classes to their import paths."""
    if isinstance(value, BaseModel):
        return escape_interpolation(value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            place = ".".join(map(str, keys)) or "the configuration"
            raise ConfigError(f"{place}: keys must be strings, given {wrong[0]!r}")
        return {key: _plain(item, (*keys, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, (*keys, index)) for index, item in enumerate(value)]
    if callable(value):
        try:
            return import_path(value)
        except ValueError as error:
            raise ConfigError(f"{'.'.join(map(str, keys))}: {error}") from error
    return str(value) if isinstance(value, PurePath) else value


def _reason(error: Exception) -> str:
    return shortened(str(getattr(error, "msg", None) or error).split("\n")[0], 300)


def _unknown_functions(merged: DictConfig, origins: Mapping[Keys, str]) -> list[Problem]:
    """The values with an interpolation `${name:...}` whose name no resolver has."""
    problems = []
    for keys, text in _texts(OmegaConf.to_container(merged), ()):
        unknown = [name for name in _FUNCTION.findall(text) if not OmegaConf.has_resolver(name)]
        if unknown:
            message = f"there is no function `{unknown[0]}` for interpolation"
            hint = "Write the value itself."
            problems.append(Problem(".".join(map(str, keys)), message, hint, given=text, origin=origins.get(keys, "")))
    return problems


def _texts(value: Any, keys: Keys) -> Iterator[tuple[Keys, str]]:
    """The texts within `value`, with their keys."""
    if isinstance(value, (Mapping, list)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _texts(item, (*keys, key))
    elif isinstance(value, str):
        yield keys, value


def _omegaconf_message(error: Exception, origins: Mapping[Keys, str]) -> str:
    key = getattr(error, "full_key", None) or ""
    origin = origins.get(tuple(key.split(".")))
    place = f" ({origin})" if origin else ""
    if is_secret_name(key):
        return f"`{key}`{place}: its interpolation cannot be resolved; write `\\${{` where the text `${{` is meant"
    return f"`{key}`{place}: {_reason(error)}" if key else f"the configuration cannot be composed: {_reason(error)}"
