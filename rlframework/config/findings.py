"""Problems found in a configuration, and the single error that lists them all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlframework.errors import ConfigError, PluginError, UnsupportedConfig

NOT_GIVEN: Any = object()
"""Marks that no value was given, where None is a valid value."""

_SHOWN = 80


@dataclass(frozen=True)
class Finding:
    """One problem: the dotted key, what is wrong, the given value, where it was written, and a hint on what to do.

    `undeclared`: the key asks for a capability that the chosen backend does not declare.
    """

    key: str
    message: str
    given: Any = NOT_GIVEN
    origin: str = ""
    hint: str = ""
    undeclared: bool = False

    def __str__(self) -> str:
        facts = []
        if self.given is not NOT_GIVEN and not isinstance(self.given, Mapping):
            facts.append(f"given {show(self.given)}")
        if self.origin:
            facts.append(f"in {self.origin}")
        text = f"`{self.key}`: {self.message}" if self.key else self.message
        if facts:
            text = f"{text.rstrip('.')} ({' '.join(facts)})"
        return f"{text.rstrip('.')}. {self.hint}" if self.hint else text


def show(value: Any) -> str:
    """Format a value as one line of YAML, truncated if it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def raise_findings(findings: Sequence[Finding], cause: PluginError | None = None) -> None:
    """Raise one error that lists `findings`, if any. `cause` is given if all of them concern choosing a plugin."""
    if not findings:
        return
    undeclared = any(finding.undeclared for finding in findings)
    error_type = PluginError if cause else UnsupportedConfig if undeclared else ConfigError
    if len(findings) == 1:
        raise error_type(str(findings[0])) from cause
    lines = "\n".join(f"- {finding}" for finding in findings)
    raise error_type(f"{len(findings)} problems in the configuration:\n{lines}") from cause
