"""The command for plugin authors: new-backend."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from rlframework.cli.common import Debug, app


@app.command("new-backend")
def new_backend(
    name: Annotated[str, Argument(help="Name of the plugin, for policy.backend or generation.name.")],
    directory: Annotated[str | None, Option(metavar="DIR", help="Folder to write. Default: rlframework-NAME.")] = None,
    kind: Annotated[str, Option(metavar="KIND", help="policy_worker or generation_engine.")] = "policy_worker",
    debug: Debug = False,
) -> None:
    """Create an installable plugin distribution for a new training backend or generation engine.

    A backend has stubs to fill in; a generation engine works, one token at a time with transformers.
    """
    from rlframework.new_backend import ENGINE, next_commands, write_plugin

    folder = write_plugin(name, directory, kind)
    engine = f"{folder.name}/rlframework_{name}/engine.py"
    print(f"created {folder}. Next steps:\n\n{next_commands(name, folder, kind)}\n")
    if kind == ENGINE:
        print(f"Then replace the model in {engine} with your engine, following docs/write_an_engine.md.")
    else:
        print(f"Then implement {engine} method by method, following docs/write_a_backend.md.")
