"""The manager's error messages: what was requested, what is installed, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

DISABLE_VARIABLE = "RLFRAMEWORK_DISABLE_PLUGINS"

KEY_OF_KIND = {
    "policy_worker": "policy.backend",
    "worker_group": "worker_group.name",
    "generation_engine": "generation.name",
    "environment": "environment.name",
    "algorithm": "algorithm.name",
    "data_processor": "policy.data_processor",
}
"""Kind of record to the configuration key that selects one."""

OWN_EXTRAS = {"policy_worker": ("dtensor", "deepspeed", "megatron")}
"""Kind of record to the names that are provided by an extra of rlframework-core."""


def unknown(kind: str, name: str, installed: Sequence[tuple[str, str]], unusable: Sequence[str]) -> str:
    """Message for an unknown name. `installed`: name and origin of each choice; `unusable`: why others are not."""
    key, own = KEY_OF_KIND[kind], OWN_EXTRAS.get(kind, ())
    parts = [f"{key}: there is no {kind} {name!r}."]
    near = difflib.get_close_matches(name, [*(known for known, _ in installed), *own], n=1)
    if near and name not in own:
        parts.append(f"Did you mean {near[0]!r}?")
    listed = ", ".join(f"{known} ({blame})" for known, blame in installed) or "none"
    parts.append(f"Installed: {listed}.")
    parts += unusable
    parts.append(_how_to_install(kind, name, near, {known for known, _ in installed}))
    return " ".join(parts)


def _how_to_install(kind: str, name: str, near: Sequence[str], installed: set[str]) -> str:
    wanted = name if name in OWN_EXTRAS.get(kind, ()) else next(iter(near), "")
    if wanted in OWN_EXTRAS.get(kind, ()) and wanted not in installed:
        return (
            f"To install {wanted}: pip install 'rlframework-core[{wanted}]', or in a clone of the repository: "
            f"pip install -e plugins/{wanted}."
        )
    return (
        f"If {name!r} comes from a plugin, install its distribution with pip, or name its module under `plugins:` in "
        "the configuration; `rlframework plugins` lists the plugins that are found."
    )


def duplicate(kind: str, name: str, blames: Sequence[str]) -> str:
    """Message for two plugins that register the same name for the same kind."""
    return (
        f"{KEY_OF_KIND[kind]}: {len(blames)} plugins register a {kind} {name!r}: {' and '.join(blames)}. Uninstall one "
        f"of them, or add its distribution to {DISABLE_VARIABLE}."
    )


def broken(subject: str, blame: str, error: BaseException) -> str:
    """Message for a plugin that could not be imported or read."""
    return f"{subject} of {blame} is broken: {reason(error)}"


def disabled(kind: str, name: str, blame: str) -> str:
    """Message for selecting a disabled plugin."""
    return (
        f"{KEY_OF_KIND[kind]}: the {kind} {name!r} ({blame}) is disabled by {DISABLE_VARIABLE}. Choose another one, or "
        "remove the name from that variable."
    )


def unknown_disabled_word(word: str, known: Iterable[str]) -> str:
    """Message for a name to disable that no plugin has."""
    names = sorted(set(known))
    near = difflib.get_close_matches(word, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{DISABLE_VARIABLE}: there is no plugin {word!r}.{hint} Plugins that can be disabled: {', '.join(names)}."


def reason(error: BaseException) -> str:
    """Return the error on one line, with its class unless it is one of rlframework's."""
    text = " ".join(str(error).split())
    if type(error).__module__ == "rlframework.errors":
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
