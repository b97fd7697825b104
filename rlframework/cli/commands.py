"""Core's commands: `train`, and those that inspect, `config`, `schema` and `plugins`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from typer import Argument, Exit, Option

from rlframework.algorithms.algorithm import RunResult
from rlframework.base.errors import ConfigError, PluginError
from rlframework.base.logs import printable
from rlframework.cli.common import Config, Debug, Json, Overrides, TrustRun, app, print_table

_SUMMARIZED = ("loss", "reward", "accuracy")


@app.command(name="config")
def show_config(config: Config, overrides: Overrides = None, as_json: Json = False, debug: Debug = False) -> None:
    """Check the keys of CONFIG and print the resolved configuration with all defaults, and why the device has others.

    Files, data and the model are not opened: `rlframework train CONFIG --dry-run` checks these too.
    Secrets of the environment are printed as references to its variables, others as ***.
    """
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


@app.command()
def train(
    config: Annotated[str | None, Argument(help="YAML file that configures the run.")] = None,
    overrides: Overrides = None,
    resume_from: Annotated[
        str | None, Option("--resume", metavar="RUN_DIR", help="Resume this run from its newest checkpoint.")
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a run in output_dir, but no other files.")] = False,
    dry: Annotated[bool, Option("--dry-run", help="Check; estimate memory, disk and tokens; write nothing.")] = False,
    on: Annotated[
        str | None,
        Option("--on", metavar="GPUS", help="With --dry-run: plan for these GPUs, e.g. 8xH100, 2x8xH100 or 2x24GiB."),
    ] = None,
    trust_run: TrustRun = False,
    debug: Debug = False,
) -> None:
    """Run the training that CONFIG describes, or resume one that was stopped.

    rlframework train --resume runs/run [a.b=value ...]

    With --dry-run --on GPUS the exit code is 1 if the run does not fit on GPUS, and 0 if it fits or may not fit.
    """
    from rlframework.plugins.configure import load_config

    if on is not None and not dry:
        raise ConfigError("--on plans a run for GPUs that may be elsewhere; give it together with --dry-run")
    if trust_run and resume_from is None:
        raise ConfigError("--trust-run is about the run that --resume names; a CONFIG that you name is trusted")
    if dry:
        if config is None or resume_from is not None:
            usage = "rlframework train CONFIG --dry-run"
            raise ConfigError(f"--dry-run checks a run before it starts, not one to resume: {usage}")
        _dry_run(config, overrides or (), on, overwrite=overwrite)
        return
    if resume_from is not None:
        if overwrite:
            raise ConfigError("--resume continues a run and --overwrite deletes it; give one of them")
        from rlframework.runner.launch import resume

        changes = [word for word in (config, *(overrides or ())) if word is not None]
        print(_summary(resume(resume_from, changes, trust_run=trust_run), resume_from))
        return
    if config is None:
        raise ConfigError("no run given: use `rlframework train CONFIG` or `rlframework train --resume RUN_DIR`")
    from rlframework.runner.launch import run

    resolved = load_config(config, overrides or ())
    print(_summary(run(resolved, overwrite=overwrite), str(resolved.output_dir)))


def _dry_run(config: str, overrides: Sequence[str], on: str | None, *, overwrite: bool) -> None:
    """Check a run without starting it, or plan it for the GPUs `on` if they are given."""
    fits = True
    if on is None:
        from rlframework.plugins.configure import load_config
        from rlframework.runner.launch import dry_run

        for note in dry_run(load_config(config, overrides), overwrite=overwrite):
            print(note)
    else:
        from rlframework.plugins.manager import create_manager

        manager = create_manager()
        if not manager.implements(hook := "rlframework_plan_elsewhere"):
            raise PluginError(f"--on needs a plugin that estimates what a run needs: {manager.how_to_get(hook)}")
        arguments = {"config": config, "overrides": overrides, "on": on, "overwrite": overwrite}
        fits = bool(manager.call_first(hook, lambda hook: hook(**arguments)))
    print("dry run complete: nothing was started or written")
    if not fits:
        raise Exit(1)


def _summary(result: RunResult, output_dir: str) -> str:
    """One line with the last metrics and the folder of the run."""
    shown = {name: value for name, value in result.metrics.items() if name.rpartition("/")[2] in _SUMMARIZED}
    values = ", ".join(f"{name}={value:.4g}" for name, value in shown.items())
    return printable(f"done: {values}; in {output_dir}" if values else f"done; in {output_dir}")
