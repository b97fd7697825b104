"""Commands that only look: config, schema, plugins, doctor, and report, which makes a page of what runs wrote."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rlframework.cli.common import Config, Debug, Json, Overrides, app, print_table


@app.command(name="config")
def show_config(config: Config, overrides: Overrides = None, as_json: Json = False, debug: Debug = False) -> None:
    """Check CONFIG and print it resolved, with every default."""
    from rlframework.configure import config_yaml, dump_config, load_config

    resolved = load_config(config, overrides or ())
    print(
        json.dumps(dump_config(resolved), indent=2) if as_json else config_yaml(resolved), end="\n" if as_json else ""
    )


@app.command()
def schema(debug: Debug = False) -> None:
    """Print the JSON schema of CONFIG, for editors."""
    from rlframework.configure import config_schema
    from rlframework.plugins.manager import create_manager

    print(json.dumps(config_schema(create_manager()), indent=2))


@app.command()
def plugins(as_json: Json = False, debug: Debug = False) -> None:
    """List the plugins, and why one cannot be used."""
    from rlframework.plugins.listing import as_json as json_of
    from rlframework.plugins.listing import as_table
    from rlframework.plugins.manager import create_manager

    rows = create_manager().listing()
    if as_json:
        print(json_of(rows))
        return
    print_table(as_table(rows))


@app.command()
def doctor(
    config: Annotated[str | None, typer.Argument(help="A YAML file: is it ready to run?", show_default=False)] = None,
    overrides: Overrides = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what this machine, its GPUs, packages, plugins and cluster look like, what will not work, and what to do.

    With CONFIG also whether its run can start: model, workers, memory, disk. Exit code 1: something that is needed is
    broken; 0: nothing is.

    \b
    rlframework doctor
    rlframework doctor grpo.yaml worker_group.num_workers=8
    """
    from rlframework.doctor import output
    from rlframework.doctor.check_runner import examine

    found = examine(config, overrides or ())
    if as_json:
        print(output.as_json(found))
    else:
        print_table(output.as_table(found))
        print(output.summary(found))
    raise typer.Exit(found.exit_code)


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN_DIR...", help="What runs wrote into.", show_default=False)],
    out: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="The page; else report.html, of one run in its folder.")
    ] = None,
    smooth: Annotated[int | None, typer.Option(help="Smooth over so many steps; the page can change it.")] = None,
    png: Annotated[str | None, typer.Option(metavar="DIR", help="For the pictures; else a folder by the page.")] = None,
    debug: Debug = False,
) -> None:
    """Make a page of RUN_DIR, or of several beside each other: curves, times, samples, configurations."""
    from pathlib import Path

    from rlframework.observers.report import write_report

    figures = None if png is None else Path(png)
    page, pictures = write_report(
        [Path(run) for run in runs], Path(out) if out is not None else None, smooth=smooth, figures=figures
    )
    where = f"; {len(pictures)} pictures in {pictures[0].parent}" if pictures else ""
    print(f"done: {page} ({page.stat().st_size / 1e6:.1f} MB, open it in a browser){where}")
