"""Hides secrets that must not leave the process: passwords and keys in configurations, addresses and messages.

Recognises secrets by well-known names and formats, and by their values: those of keys and of environment variables with
such a name. A secret in another format under another name is not found.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

HIDDEN = "***"
SHORTEST = 6
"""The fewest characters of a value that is hidden wherever it stands; shorter ones are parts of other words."""

_SECRET_NAME = re.compile(
    r"""
    (?: (?:^|[._-])
        (?: pwd | secrets? | credentials? | bearer | (?:proxy-)?authorization | apikey
          | (?:access|api|auth|bearer|deploy|github|gitlab|hf|hub|jwt|mlflow|oauth|personal|private|refresh|registry
              |secret|security|service|session|wandb)[._-]?token
          | (?:access|account|admin|api|client|encryption|hmac|master|private|secret|service|shared|signing|ssh|storage
              |wandb)[._-]?key )
      | password | passwd | passphrase | (?:^|[a-z])secret | (?:^|\.)token
      | (?-i: (?:^|_)TOKEN | _(?:PASS|PAT|SAS|AUTH) )
    ) (?:[._-]?\d+)? $
    """,
    re.IGNORECASE | re.VERBOSE,
)
_USER_OF_ADDRESS = re.compile(  # with one slash, too, as `pathlib` writes it
    r"""(\w:/{1,2})(?:[^/\s:@"'<>]{1,99}:(?!\d+(?:/|$))[^\s"'<>]{0,299}|[^/\s"'<>]{0,299})@"""
)
_PASSWORD_OF_ADDRESS = re.compile(r""":/{1,2}[^/\s:@"'<>]{0,99}:([^\s"'<>]{1,299})@""")
_SIGNATURE_OF_ADDRESS = re.compile(r"(?<=[?&])(sig|[\w-]{0,20}signature|key|code)=[^&\s\"'<>]+", re.IGNORECASE)
_KNOWN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
    r"|wandb_v\d_\w{16,}|xox[abeprs]-[\w-]{10,}|AKIA[A-Z0-9]{16}|AIza[\w-]{30,})"
    r"|(?<![\w-])eyJ[\w-]{8,}\.eyJ[\w-]{8,}[\w.-]*"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_IN_HEADER = re.compile(r"\b(authorization[\"']?\s*[:=]\s*[\"']?(?:\w+ +)?|bearer +)[\w.~+/=*-]{6,}", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"""(?<![\w.-])(?P<name>[A-Za-z][\w.-]{0,99})(?P<quote>\\?["']|)\s*(?P<sign>[=:])\s*""")
"""The part before the value of `API_KEY=abc`, `api_key: abc` or `"password": "abc"`: in commands and tracebacks."""
_ASSIGNED = re.compile(
    r"""(?P<mark>["'])(?:\\.|(?!(?P=mark))[^\\\n])*(?:(?P=mark)|$)|(?P<escaped>\\["'])(?:(?!\\["'])[^\n])*(?:\\["']|$)"""
    r"""|[^\s"'&`]+""",
    re.MULTILINE,
)


def is_secret_name(name: str) -> bool:
    """Whether `name`, which may be dotted, names a password or key, such as `hub.api_key` but not `max_tokens`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-"))  # `apiKey` too
    return _SECRET_NAME.search(words) is not None


def is_secret(name: str, value: str) -> bool:
    """Whether the variable `name` holds a secret, by its name or because its value has one in a known format."""
    # shells keep the current directory in PWD
    return (is_secret_name(name) and name != "PWD") or _hide_formats(value) != value


def hide_in_text(text: str, also: Iterable[str] = ()) -> str:
    """Hide secrets in `text`: the user part of addresses, assignments to secret names, keys by their format or value.

    `also`: further secrets, hidden wherever they stand.
    """
    return _hide(text, _by_length([*also, *secrets_of_environment()]))


def secrets_of_environment() -> dict[str, str]:
    """Return the names of the environment variables that hold secrets, by their values, the longest first."""
    found = {value.strip(): name for name, value in os.environ.items() if is_secret(name, value)}
    return {value: found[value] for value in sorted(found, key=len, reverse=True) if len(value) >= SHORTEST}


def hide_secrets(values: Any) -> Any:
    """A copy of `values` (JSON types) with secrets hidden: values with a secret name, entirely, wherever they stand.

    References to environment variables (`${oc.env:NAME}`) are not secrets.
    """
    return _hidden(values, "", _by_length([*named_secrets(values), *secrets_of_environment()]))


def has_secrets(values: Any) -> bool:
    """Whether `hide_secrets` hides anything in `values`."""
    return bool(hide_secrets(values) != values)


def named_secrets(values: Any, name: str = "") -> Iterator[str]:
    """Yield the values with a secret name in `values` (JSON types), and the passwords of addresses."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from named_secrets(value, name if is_secret_name(name) else str(key))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from named_secrets(value, name)
    elif isinstance(values, (str, int, float)) and not isinstance(values, bool):
        if is_secret_name(name) and not _is_reference(values):
            yield str(values)
        if isinstance(values, str):
            yield from _PASSWORD_OF_ADDRESS.findall(values)


def _hidden(values: Any, name: str, secrets: Iterable[str]) -> Any:
    if name and is_secret_name(name) and values not in (None, "") and not _is_reference(values):
        return HIDDEN
    if isinstance(values, Mapping):
        return {key: _hidden(value, str(key), secrets) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_hidden(value, "", secrets) for value in values]
    return _hide(values, secrets) if isinstance(values, str) else values


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\$\{oc\.env:\w+\}\W*", value) is not None


def _by_length(secrets: Iterable[str]) -> list[str]:
    """`secrets` that are long enough, also as they stand in JSON, in `repr` and in addresses, the longest first."""
    forms = {
        form
        for secret in secrets
        if len(secret) >= SHORTEST
        for form in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, "", errors="replace"))
    }
    return sorted(forms, key=len, reverse=True)


def _hide(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _hide_formats(text)


def _hide_formats(text: str) -> str:
    text = _USER_OF_ADDRESS.sub(rf"\1{HIDDEN}@", text)
    text = _SIGNATURE_OF_ADDRESS.sub(rf"\1={HIDDEN}", text)
    text = _IN_HEADER.sub(rf"\1{HIDDEN}", text)
    return _KNOWN_SHAPES.sub(HIDDEN, _hide_assigned(text))


def _hide_assigned(text: str) -> str:
    parts, end = list[str](), 0
    for found in _ASSIGNMENT.finditer(text):
        prose = found["sign"] == ":" and not found["quote"] and re.fullmatch("[a-z]+", found["name"])  # bad token: `}`
        if found.start() < end or prose or not is_secret_name(found["name"]):
            continue
        value = _ASSIGNED.match(text, found.end())
        if value is not None and not _is_reference(value[0]):
            mark = value["mark"] or value["escaped"] or ""
            parts += [text[end : found.end()], mark, HIDDEN, mark]
            end = value.end()
    return "".join([*parts, text[end:]])
