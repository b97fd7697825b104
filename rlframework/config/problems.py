"""Problems found in a configuration, and the single error that lists them all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlframework.base.errors import ConfigError, PluginError, UnsupportedConfig
from rlframework.base.secrets import HIDDEN, hide_secrets, is_secret_name

NOT_GIVEN: Any = object()
"""Marks that no value was given, where None is a valid value."""

MOST = 40
"""The most problems that an error lists."""

_SHOWN = 80


def shortened(text: str, most: int = _SHOWN) -> str:
    """Return `text`, cut to `most` characters, the last of which then are dots."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


@dataclass(frozen=True)
class Problem:
    """One problem in a configuration: the dotted key, what is wrong, and what to do.

    `undeclared`: the key asks for a capability that the chosen plugin does not declare. `given` is the value, if the
    message is to show it. `origin` is where the value was written; `load_config` adds it to the problems of checks.
    `cause` is the error of a plugin that cannot be selected. `installation`: only something that is not installed here
    is missing, so that a plan for other hardware reports it as a note.
    """

    key: str
    message: str
    hint: str = ""
    undeclared: bool = False
    given: Any = NOT_GIVEN
    origin: str = ""
    cause: PluginError | None = None
    installation: bool = False

    def __str__(self) -> str:
        facts = [f"in {self.origin}"] if self.origin else []
        if self.given is not NOT_GIVEN and not isinstance(self.given, Mapping):
            given = HIDDEN if is_secret_name(self.key) else hide_secrets(self.given)
            facts.insert(0, f"given {shortened(json.dumps(given, ensure_ascii=False, default=str))}")
        message = shortened(self.message, 1000)
        text = f"`{shortened(self.key, 200)}`: {message}" if self.key else message
        if facts:
            text = f"{text.rstrip('.')} ({' '.join(facts)})"
        return f"{text.rstrip('.')}. {self.hint}" if self.hint else text


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one error that lists `problems`, if any: a `PluginError` if all of them concern selecting a plugin."""
    if not problems:
        return
    cause = problems[0].cause if all(problem.cause for problem in problems) else None
    undeclared = any(problem.undeclared for problem in problems)
    error_type = PluginError if cause else UnsupportedConfig if undeclared else ConfigError
    if len(problems) == 1:
        raise error_type(str(problems[0])) from cause
    lines = "\n".join(f"- {problem}" for problem in problems[:MOST])
    more = f"\nand {len(problems) - MOST} more" if len(problems) > MOST else ""
    raise error_type(f"{len(problems)} problems in the configuration:\n{lines}{more}") from cause
