"""The commands that plugins add through the hook `rlframework_commands`.

They are collected when the command line asks for a command that core does not have, or for the list of all commands. So
a plugin that is broken, slow or in conflict with another never disturbs core's commands.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import typer

from rlframework.base.errors import PluginError
from rlframework.plugins.discovery import install_hint, one_line
from rlframework.plugins.manager import PluginManager

_LOG = logging.getLogger(__name__)


def collect_commands(manager: PluginManager, reserved: Collection[str]) -> dict[str, Any]:
    """Return the commands of all active plugins by name. Two plugins may not share a name, nor take a `reserved` one.

    The command of a shared name raises a `PluginError` that names both; other problems are warnings.
    """
    commands: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for owner, call in manager.callers("rlframework_commands"):
        app = typer.Typer(rich_markup_mode=None)
        app.callback()(lambda: None)  # without it, one command alone would be no group
        try:
            call(app=app)
            added = getattr(typer.main.get_command(app), "commands")  # noqa: B009 - typed as a command
        except Exception as error:  # noqa: BLE001 - other commands work on
            _LOG.warning("warning: the commands of %s are missing: %s", owner, one_line(error))
            continue
        for name, command in added.items():
            if name in reserved:
                _LOG.warning("warning: the command %r of %s is ignored: core has one of that name", name, owner)
                continue
            commands[name] = _conflict(name, owners[name], owner) if name in owners else command
            owners[name] = owner
    return commands


def why_missing(name: str, manager: PluginManager) -> str:
    """Return what to do about a command `name` that neither core nor a plugin has."""
    unusable = [
        f" {row.name} of {row.distribution} {row.version} is {row.status}: {row.reason}."
        for row in manager.listing()
        if row.status != "active" and row.kind is None
    ]
    return f" Plugins add commands: {install_hint(name)}.{''.join(unusable)}"


def _conflict(name: str, first: str, second: str) -> Any:
    app = typer.Typer(rich_markup_mode=None)

    @app.command(name, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def conflict() -> None:
        """Two plugins add this command."""
        raise PluginError(
            f"two plugins add the command {name!r}: {first} and {second}. Uninstall one of them, or add its "
            "distribution to RLFRAMEWORK_DISABLE_PLUGINS."
        )

    return typer.main.get_command(app)
