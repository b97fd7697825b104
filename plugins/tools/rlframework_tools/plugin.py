"""The plugin of this distribution: its commands, and estimates of planned runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel
from typer import Argument, Option

from rlframework.base.errors import UserError
from rlframework.cli.common import Config, Debug, Json, Overrides, print_table
from rlframework.plugins.hookspec import hookimpl
from rlframework_tools.evaluation.commands import evaluate, generate
from rlframework_tools.new_config import init

if TYPE_CHECKING:
    from rlframework.config.sections import RunConfig


@hookimpl
def rlframework_commands(app: typer.Typer) -> None:
    """Add `init`, `evaluate`, `generate`, `doctor`, `new-backend`, `convert` and `tokenize`."""
    app.command()(init)
    app.command()(evaluate)
    app.command()(generate)
    app.command()(doctor)
    app.command("new-backend")(new_backend)
    app.command()(convert)
    app.command()(tokenize)


@hookimpl
def rlframework_key_hint(path: tuple[str, ...], value: object, model: type[BaseModel] | None) -> str | None:
    """Return what TRL, peft, verl, OpenRLHF or NeMo-RL mean by the key `path`."""
    from rlframework_tools.peers.hints import peer_hint

    return peer_hint(path, value, model) or None


@hookimpl
def rlframework_value_hint(key: str, value: object) -> str | None:
    """Return what one of them means by `value`."""
    from rlframework_tools.peers.hints import value_hint

    return value_hint(key, value) or None


@hookimpl
def rlframework_configuration_hint(
    unknown: Mapping[tuple[str, ...], Any],
    hints: Sequence[str],
    algorithm: Mapping[str, Any],
    model: type[BaseModel] | None,
) -> str | None:
    """Return a note on a configuration with their keys: its preset, and its batches in numbers."""
    from rlframework_tools.peers.hints import peer_notes

    return peer_notes(unknown, hints, algorithm, model) or None


@hookimpl
def rlframework_run_planned(parts: Any, dry_run: bool) -> None:
    """Log notes on the configuration, and print the estimate of the run: for a dry run all of it."""
    from rlframework_tools.estimates.printing import print_brief, print_in_full
    from rlframework_tools.notes import log_notes

    log_notes(parts.config)
    (print_in_full if dry_run else print_brief)(parts)


@hookimpl
def rlframework_plan_elsewhere(config: str, overrides: Sequence[str], on: str, overwrite: bool) -> bool:
    """Print the estimate of the run on the GPUs `on`; return whether it fits."""
    from rlframework_tools.estimates.printing import print_elsewhere

    return print_elsewhere(config, overrides, on, overwrite=overwrite)


def doctor(
    config: Annotated[str | None, Argument(help="YAML file of a run to check as well.")] = None,
    overrides: Overrides = None,
    measure: Annotated[
        bool, Option("--measure", help="Run a few steps of CONFIG, and report how many engines keep its trainer busy.")
    ] = False,
    rates: Annotated[str | None, Option(metavar="RUN_DIR", help="Take the rates from this run instead.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Diagnose this machine: hardware, packages, plugins and cluster, with a remedy for each problem.

    With CONFIG, also check whether its run can start: model, workers, memory, disk. Exit code 1: something required
    is broken; 0: nothing is.

    \b
    rlframework doctor
    rlframework doctor grpo.yaml worker_group.num_workers=8
    rlframework doctor grpo.yaml --measure
    """
    from rlframework_tools.doctor.examination import examine

    if config is None and (measure or rates is not None):
        raise UserError("--measure and --rates need a CONFIG; give it before them")
    found = examine(config, overrides or (), rates=rates, measure=measure)
    if as_json:
        print(found.as_json())
    else:
        print_table(found.as_table())
        print(found.summary())
    raise typer.Exit(found.exit_code)


def new_backend(
    name: Annotated[str, Argument(help="Name of the plugin, for policy.backend or generation.name.")],
    directory: Annotated[str | None, Option(metavar="DIR", help="Folder to write. Default: rlframework-NAME.")] = None,
    kind: Annotated[str, Option(metavar="KIND", help="policy_worker or generation_engine.")] = "policy_worker",
    debug: Debug = False,
) -> None:
    """Create an installable plugin distribution for a new training backend or generation engine.

    A backend has stubs to fill in; a generation engine works, one token at a time with transformers.
    """
    from rlframework_tools.new_backend import ENGINE, next_commands, write_plugin

    folder = write_plugin(name, directory, kind)
    engine = f"{folder.name}/rlframework_{name}/engine.py"
    print(f"created {folder}. Next steps:\n\n{next_commands(name, folder, kind)}\n")
    if kind == ENGINE:
        print(f"Then replace the model in {engine} with your engine, following docs/write_an_engine.md.")
    else:
        print(f"Then implement {engine} method by method, following docs/write_a_backend.md.")


def convert(
    source: Annotated[str, Argument(help="A run's output_dir (its newest checkpoint), a checkpoint, or a model.")],
    dest: Annotated[str, Argument(help="A folder that does not exist yet.")],
    to: Annotated[str, Option(metavar="FORM", help="Target format: portable, sharded or huggingface.")],
    overwrite: Annotated[bool, Option("--overwrite", help="Replace DEST if it is a checkpoint.")] = False,
    debug: Debug = False,
) -> None:
    """Convert a checkpoint to another format, tensor by tensor, without a GPU.

    portable: whole tensors, with a Hugging Face directory in model/; sharded: the shards of torch's DCP;
    huggingface: the model alone, with LoRA adapters merged. A model directory has no optimizer state to convert.

    \b
    rlframework convert runs/grpo models/grpo --to huggingface
    rlframework convert runs/grpo/checkpoints/step-000100 portable-100 --to portable
    """
    from rlframework_tools.command_output import progress_bar
    from rlframework_tools.convert import convert as run

    with progress_bar("tensors") as progress:
        done = run(source, dest, to, overwrite=overwrite, progress=progress)
    print(done)


def tokenize(
    config: Config,
    out: Annotated[str | None, Argument(help="New folder to write; not with --show.")] = None,
    overrides: Overrides = None,
    show: Annotated[int | None, Option(min=1, help="Print this many rows, and write nothing.")] = None,
    debug: Debug = False,
) -> None:
    """Tokenize the training rows of CONFIG once and write them to the folder OUT, for algorithm.token_data.

    With --show N, print the first N rows instead: tokens that are trained on are green, or in [[ ]] without colors.
    With an algorithm that samples completions, such as grpo, rows are its prompts; with one on preference pairs, such
    as dpo, each pair is two rows: prompt and chosen answer, prompt and rejected answer.

    \b
    rlframework tokenize sft.yaml data/tokens
    rlframework tokenize sft.yaml --show 3
    rlframework tokenize dpo.yaml --show 2
    """
    from rlframework.plugins.configure import load_config

    if show is not None:  # then the first override is where OUT would be
        _show_rows(load_config(config, [*filter(None, [out]), *(overrides or ())]), show)
        return
    if out is None:
        raise UserError("OUT is missing: give a new folder to write, or --show N to look at rows")
    from rlframework_tools.command_output import progress_bar

    resolved = load_config(config, overrides or ())
    with progress_bar("rows") as progress:
        from rlframework_tools.tokenize import tokenize as write

        meta = write(resolved, out, progress=progress).meta
    print(
        f"done: {meta['rows']:,} rows of at most {meta['longest']:,} tokens, {meta['tokens']:,} in total, "
        f"{meta['trained_tokens']:,} of them trained on; in {out}"
    )


def _show_rows(config: RunConfig, count: int) -> None:
    from rich.console import Console
    from rich.text import Text

    from rlframework_tools.tokenize import shown_rows

    console = Console(soft_wrap=True, highlight=False)
    for row in shown_rows(config, count):
        console.print(Text(f"{row.id}: {row.tokens} tokens", style="bold"))
        text = Text()
        for part, trained in row.parts:
            plain = trained and console.color_system is None
            text.append(f"[[{part}]]" if plain else part, style="green" if trained else "dim")
        console.print(text, end="\n\n")
