"""Hides secrets that must not leave the process: passwords and keys in commands, configurations and addresses.

Recognises secrets by well-known names and formats, and by their values: those of keys and of environment variables with
such a name. A secret in another format under another name is not found.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlframework.config.yaml_text import parse_value
from rlframework.errors import ConfigError

HIDDEN = "***"
SHORTEST = 6
"""The fewest characters of a value that is hidden wherever it stands; shorter ones are parts of other words."""

_SECRET_WORDS = re.compile(
    r"(?:^|[._-])(?:password|passwd|secret|credentials?|bearer|auth[_-]?token|access[_-]?token|hf[_-]?token|api[_-]?token"
    r"|(?:api|access|secret|private)[_-]?key|apikey)$|(?:^|\.)token$|(?-i:_TOKEN)$",
    re.IGNORECASE,
)
_USER_OF_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")
_KNOWN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[opsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[\w-]{16,}|wandb_v\d_\w{16,})"
)


def is_secret_name(name: str) -> bool:
    """Whether `name`, which may be dotted, names a password or key, such as `hub.api_key` but not `max_tokens`."""
    return _SECRET_WORDS.search(name.lstrip("-")) is not None


def hide_in_text(text: str) -> str:
    """Hide the user part of addresses (`https://user:password@host`), and keys by their format or value, in `text`."""
    return _hide(text, secrets_of_environment())


def secrets_of_environment() -> dict[str, str]:
    """Return the names of the environment variables that are named like secrets, by their values, the longest first."""
    found = {value: name for name, value in os.environ.items() if is_secret_name(name) and len(value) >= SHORTEST}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def hide_secrets(values: Any) -> Any:
    """A copy of `values` (JSON types) with secrets hidden: values with a secret name, entirely, wherever they stand."""
    secrets = [*_named_secrets(values, ""), *secrets_of_environment()]
    return _hidden(values, "", sorted(secrets, key=len, reverse=True))


def has_secrets(values: Any) -> bool:
    """Whether `hide_secrets` hides anything in `values`."""
    return bool(hide_secrets(values) != values)


def refer_to_environment(values: Any) -> Any:
    """A copy of the `values` of a configuration with `${oc.env:NAME}` in place of secrets of the environment.

    `${` must be escaped in `values`; loading them gives the same configuration where the environment has them.
    """
    return _replaced(values, {value: f"${{oc.env:{name}}}" for value, name in secrets_of_environment().items()})


def clean_command(arguments: Sequence[str]) -> list[str]:
    """A command line fit for recording: the program's name without its path, no secrets, `~` for the home directory."""
    cleaned = [Path(argument).name for argument in arguments[:1]]
    hide_next = False
    for argument in arguments[1:]:
        name, equals, value = argument.partition("=")
        if hide_next:
            cleaned.append(HIDDEN)
        elif equals and is_secret_name(name):
            cleaned.append(f"{name}={HIDDEN}")
        elif equals and value.lstrip().startswith(("{", "[")):
            cleaned.append(f"{name}={_without_home(_clean_value(value))}")
        else:
            cleaned.append(_without_home(hide_in_text(argument)))
        hide_next = not hide_next and not equals and name.startswith("--") and is_secret_name(name)
    return cleaned


def _clean_value(text: str) -> str:
    """The YAML `text` of a mapping or list without secrets; all of it is hidden if it cannot be read."""
    try:
        values = parse_value(text, "argument")
    except ConfigError:
        return HIDDEN
    hidden = hide_secrets(values)
    return text if hidden == values else json.dumps(hidden, ensure_ascii=False)


def _named_secrets(values: Any, name: str) -> Iterator[str]:
    if isinstance(values, str):
        if is_secret_name(name) and len(values) >= SHORTEST:
            yield values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from _named_secrets(value, str(key))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _named_secrets(value, name)


def _hidden(values: Any, name: str, secrets: Sequence[str]) -> Any:
    if name and is_secret_name(name) and values not in (None, ""):
        return HIDDEN
    if isinstance(values, Mapping):
        return {key: _hidden(value, str(key), secrets) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_hidden(value, "", secrets) for value in values]
    return _hide(values, secrets) if isinstance(values, str) else values


def _hide(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _KNOWN_SHAPES.sub(HIDDEN, _USER_OF_ADDRESS.sub(f"{HIDDEN}@", text))


def _replaced(values: Any, replacements: Mapping[str, str]) -> Any:
    if isinstance(values, Mapping):
        return {key: _replaced(value, replacements) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_replaced(value, replacements) for value in values]
    if isinstance(values, str):
        for old, new in replacements.items():
            values = values.replace(old, new)
    return values


def _without_home(text: str) -> str:
    home = str(Path.home())
    return re.sub(rf"{re.escape(home)}(?![^/\"' ,}}\]])", "~", text) if len(home) > 1 else text
