"""Hides secrets that must not leave the process: passwords and keys in commands, configurations and addresses.

Recognises secrets by well-known names and formats. A secret in another format under another name is not found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HIDDEN = "***"

_SECRET_WORDS = re.compile(
    r"(?:^|[._-])(?:password|passwd|secret|credentials?|bearer|auth[_-]?token|access[_-]?token|hf[_-]?token|api[_-]?token"
    r"|(?:api|access|secret|private)[_-]?key|apikey)$",
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
    """Hide the user part of addresses (`https://user:password@host`) and keys in a known format in `text`."""
    return _KNOWN_SHAPES.sub(HIDDEN, _USER_OF_ADDRESS.sub(f"{HIDDEN}@", text))


def hide_secrets(values: Any, name: str = "") -> Any:
    """A copy of `values` (JSON types) with secrets hidden; every value with a secret name is hidden entirely."""
    if name and is_secret_name(name) and values not in (None, ""):
        return HIDDEN
    if isinstance(values, Mapping):
        return {key: hide_secrets(value, str(key)) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [hide_secrets(value) for value in values]
    return hide_in_text(values) if isinstance(values, str) else values


def clean_command(arguments: Sequence[str]) -> list[str]:
    """A command line fit for recording: the program's name without its path, no secrets, `~` for the home directory."""
    cleaned = [Path(argument).name for argument in arguments[:1]]
    hide_next = False
    for argument in arguments[1:]:
        name, equals, _ = argument.partition("=")
        if hide_next:
            cleaned.append(HIDDEN)
        elif equals and is_secret_name(name):
            cleaned.append(f"{name}={HIDDEN}")
        else:
            cleaned.append(_without_home(hide_in_text(argument)))
        hide_next = not hide_next and not equals and name.startswith("--") and is_secret_name(name)
    return cleaned


def _without_home(text: str) -> str:
    home = str(Path.home())
    return re.sub(rf"{re.escape(home)}(?=/|$)", "~", text) if len(home) > 1 else text
