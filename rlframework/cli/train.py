"""Commands of training: train, convert, tokenize."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rlframework.cli.common import Config, Debug, Out, Overrides, app, print_table
from rlframework.errors import ConfigError

if TYPE_CHECKING:
    from rlframework.algorithm import RunResult

_TELLING = ("loss", "reward", "accuracy")


@app.command()
def train(
    config: Annotated[str | None, typer.Argument(help="A YAML file.", show_default=False)] = None,
    overrides: Overrides = None,
    resume_from: Annotated[
        str | None, typer.Option("--resume", metavar="RUN_DIR", help="Go on with this run from its newest checkpoint.")
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Only check, and reckon memory, disk and tokens; write nothing.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Run the training that CONFIG describes, or go on with one that was stopped.

    rlframework train --resume runs/run [a.b=value ...]
    """
    if dry:
        _dry_run(config, overrides or (), resume_from)
        return
    if resume_from is not None:
        from rlframework.runner.launch import resume

        changes = [word for word in (config, *(overrides or ())) if word is not None]
        print(_summary(resume(resume_from, changes), resume_from))
        return
    if config is None:
        raise ConfigError("give the YAML file of the run: rlframework train CONFIG, or --resume RUN_DIR")
    from rlframework.configure import load_config
    from rlframework.runner.launch import run

    resolved = load_config(config, overrides or ())
    print(_summary(run(resolved), str(resolved.output_dir)))


def _dry_run(config: str | None, overrides: Sequence[str], resume_from: str | None) -> None:
    if config is None or resume_from is not None:
        raise ConfigError("--dry-run is of a run that starts: rlframework train CONFIG --dry-run")
    from rlframework.configure import load_config
    from rlframework.runner.launch import dry_run

    found = dry_run(load_config(config, overrides))
    print_table(found.table())
    for warning in found.warnings():
        print(warning, file=sys.stderr)
    print("checked: nothing was started and nothing written")


def _summary(result: RunResult, output_dir: str) -> str:
    """One line: how well it went at the end, and where the run lies."""
    values = ", ".join(
        f"{name}={value:.4g}" for name, value in result.metrics.items() if name.rpartition("/")[2] in _TELLING
    )
    return f"done: {values}; in {output_dir}" if values else f"done; in {output_dir}"


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A run's output_dir (its newest checkpoint), a checkpoint in it, or a model directory.",
            show_default=False,
        ),
    ],
    dest: Annotated[str, typer.Argument(help="A folder that is not there yet.", show_default=False)],
    to: Annotated[str, typer.Option(metavar="FORM", help="portable, sharded or huggingface.", show_default=False)],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DEST, where it is a checkpoint.")] = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint in another form, here and without a GPU, a tensor at a time.

    portable: whole tensors, model/ being a Hugging Face directory; sharded: pieces, as torch's DCP writes them;
    huggingface: the model alone. From a model directory there is no optimizer state to convert.

    \b
    rlframework convert runs/grpo models/grpo --to huggingface
    rlframework convert runs/grpo/checkpoints/step-000100 portable-100 --to portable
    """
    from rlframework.observers.progress import counting
    from rlframework.runner.convert import convert as run

    with counting("tensors") as progress:
        done = run(source, dest, to, overwrite=overwrite, progress=progress)
    print(done.told())


@app.command()
def tokenize(config: Config, out: Out, overrides: Overrides = None, debug: Debug = False) -> None:
    """Render the training rows of CONFIG once, into the folder OUT, for algorithm.token_data."""
    from rlframework.configure import load_config
    from rlframework.observers.progress import counting

    resolved = load_config(config, overrides or ())
    with counting("rows") as progress:
        from rlframework.runner.tokenize import tokenize as write

        meta = write(resolved, out, progress=progress).meta
    print(
        f"done: {meta['rows']:,} rows of at most {meta['longest']:,} tokens, {meta['tokens']:,} in all, of which "
        f"{meta['trained_tokens']:,} are trained on; in {out}"
    )
