"""The commands that plugins add through the hook `rlframework_commands`.

They are collected when the command line asks for a command that core does not have, or for the list of all commands. So
a plugin that is broken, slow or in conflict with another never disturbs core's commands.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import typer

from rlframework.base.errors import PluginError
from rlframework.plugins.discovery import DISABLE_VARIABLE
from rlframework.plugins.hook_calls import Hook
from rlframework.plugins.manager import PluginManager

_LOG = logging.getLogger(__name__)


def collect_commands(manager: PluginManager, reserved: Collection[str]) -> dict[str, Any]:
    """Return the commands of all active plugins by name. Two plugins may not share a name, nor take a `reserved` one.

    The command of a shared name raises a `PluginError` that names both; other problems are warnings.
    """
    commands: dict[str, Any] = {}
    owners: dict[str, list[str]] = {}
    for plugin, added in manager.call("rlframework_commands", _commands):
        for name, command in added.items():
            if name in reserved:
                _LOG.warning("warning: the command %r of %s is ignored: core has one of that name", name, plugin)
                continue
            owners.setdefault(name, []).append(str(plugin))
            commands[name] = command if len(owners[name]) == 1 else _conflict(name, owners[name])
    return commands


def _commands(hook: Hook) -> dict[str, Any]:
    """The commands of one plugin by name."""
    app = typer.Typer(rich_markup_mode=None)
    app.callback()(lambda: None)  # without it, one command alone would be no group
    hook(app=app)
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands")  # noqa: B009 - typed as a command
    return commands


def _conflict(name: str, owners: Sequence[str]) -> Any:
    app = typer.Typer(rich_markup_mode=None)

    @app.command(name, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def conflict() -> None:
        """More than one plugin adds this command."""
        raise PluginError(
            f"{len(owners)} plugins add the command {name!r}: {' and '.join(owners)}. Uninstall all but one, or add "
            f"the distributions of the others to {DISABLE_VARIABLE}."
        )

    return typer.main.get_command(app)
