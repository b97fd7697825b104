"""Commands that inspect: config, schema, plugins."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

from typer import Argument

from rlframework.cli.common import Config, Debug, Json, Overrides, app, print_table


@app.command(name="config")
def show_config(config: Config, overrides: Overrides = None, as_json: Json = False, debug: Debug = False) -> None:
    """Check the keys of CONFIG and print the resolved configuration with all defaults, and why the device has others.

    Files, data and the model are not opened: `rlframework train CONFIG --dry-run` checks these too.
    Secrets of the environment are printed as references to its variables, others as ***.
    """
    from rlframework.base.logs import printable
    from rlframework.base.secrets import hide_secrets, secrets_of_environment
    from rlframework.config.load import escape_interpolation
    from rlframework.config.yaml_text import to_yaml
    from rlframework.plugins.configure import dump_selected, load

    loaded = load(config, overrides or ())
    values = dump_selected(loaded.config)
    if as_json:
        print(json.dumps(hide_secrets(values), indent=2))
        return
    print("# only keys were checked; rlframework train CONFIG --dry-run checks files, data and the model too")
    for default in loaded.defaults:
        print(f"# {default.key}: {default.value!r} is a default {default.where}: {default.reason}")
    shown = hide_secrets(escape_interpolation(values, secrets_of_environment()))
    print(printable(to_yaml(shown).rstrip("\n")))


@app.command()
def schema(debug: Debug = False) -> None:
    """Print the JSON schema of configuration files, for editors."""
    from rlframework.plugins.configure import config_schema
    from rlframework.plugins.manager import create_manager

    print(json.dumps(config_schema(create_manager()), indent=2))


@app.command()
def plugins(
    name: Annotated[str | None, Argument(help="List those of this name, or of this kind, such as environment.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the plugins, with the reason if one cannot be used."""
    from rlframework.plugins.listing import PluginTable, named
    from rlframework.plugins.manager import create_manager

    rows = create_manager().listing()
    if name is not None:
        rows = named(name, rows)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print_table(PluginTable(rows))
