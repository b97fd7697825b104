"""Commands for the authors of parts: conformance, parity, new-backend."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rlframework.cli.common import Debug, app, print_table
from rlframework.errors import UserError


@app.command()
def conformance(
    backend: Annotated[str, typer.Argument(help="The name of a part: dtensor, ray, addition, ...", show_default=False)],
    keys: Annotated[list[str] | None, typer.Argument(help="Keys of the part's own section, such as path=x.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Only the layouts of so many workers.", show_default=False)
    ] = None,
    layout: Annotated[list[str] | None, typer.Option(help="Such as data=2,tensor=2; again for more.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all that was measured.")
    ] = None,
    markdown: Annotated[str | None, typer.Option(metavar="FILE", help="Write tables of it.")] = None,
    test: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this test; again for more.")] = None,
    as_list: Annotated[bool, typer.Option("--list", help="List the tests, and run none.")] = False,
    mutants: Annotated[bool, typer.Option("--mutants", help="Prove the suites: broken parts must fail.")] = False,
    debug: Debug = False,
) -> None:
    """Run the conformance suites of the part BACKEND, in all layouts that it declares.

    Exit code 0: it conforms, or with --test: the chosen tests hold, which alone leaves the verdict INCOMPLETE; with
    --mutants: all are caught. 1: that is not so. 2: it could not be run.

    \b
    rlframework conformance dtensor --workers 2
    rlframework conformance dtensor --layout tensor=2 --layout data=2,tensor=2 --json dtensor.json
    rlframework conformance gsm8k train_path=train.jsonl validation_path=test.jsonl
    rlframework conformance dtensor --list
    """
    from rlframework.conformance.command import Request, run, table_of_tests

    request = Request(
        backend, workers, layout or (), device, json_file, markdown, test or (), mutants=mutants, keys=keys or ()
    )
    if as_list:
        print_table(table_of_tests(request))
    else:
        raise typer.Exit(run(request))


@app.command()
def parity(
    backends: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="BACKEND[:LAYOUT][/KEY=VALUE]...",
            help="Such as dtensor:data=2, or deepspeed:data=2/zero_optimization.stage=3 with keys of its own section; "
            "none: all that are installed.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="DIR", help="A model directory; none: a tiny model.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps (20).", show_default=False)] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of each (8).", show_default=False)] = None,
    precision: Annotated[list[str] | None, typer.Option(help="float32, bfloat16; again for more.")] = None,
    batching: Annotated[list[str] | None, typer.Option(help="padded, dynamic, packed; again for more.")] = None,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Activation checkpointing too.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    run: Annotated[str | None, typer.Option("--replay", metavar="RUN_DIR", help="A recorded step of this run.")] = None,
    step: Annotated[int | None, typer.Option(help="The step to replay.", show_default=False)] = None,
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write all figures.")] = None,
    debug: Debug = False,
) -> None:
    """Compare backends with the oracle: log-probabilities, loss, gradient norm and weights after the same steps."""
    if (run is None) != (step is None):
        raise UserError("--replay RUN_DIR and --step N go together: which run, and which of its recorded steps")
    given = {"--model": model, "--steps": steps, "--rows": rows, "--batching": batching}
    given["--checkpointing"] = checkpointing or None
    if run is not None and (wrong := [name for name, value in given.items() if value is not None]):
        raise UserError(f"{', '.join(wrong)} cannot go with --replay: the recorded step says what is computed")
    from rlframework.conformance.parity import command

    common: dict[str, Any] = {"precisions": precision or (), "device": device, "json_file": json_file}
    if run is not None and step is not None:
        raise typer.Exit(command.replay(run, step, backends or (), **common))
    common |= {name: value for name, value in (("steps", steps), ("rows", rows)) if value is not None}
    common |= {"modes": batching or (), "checkpointing": checkpointing}
    raise typer.Exit(command.parity(backends or (), model=model, **common))


@app.command("new-backend")
def new_backend(
    name: Annotated[str, typer.Argument(help="The word for policy.backend, such as mine.", show_default=False)],
    directory: Annotated[
        str | None, typer.Option(metavar="DIR", help="The folder to write; none: rlframework-NAME.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a plugin distribution for a training backend of your own: it installs, and says what to write next."""
    from rlframework.new_backend import next_commands, write_backend

    folder = write_backend(name, directory)
    print(f"written: {folder}. Next:\n\n{next_commands(name, folder)}\n")
    print(f"Fill {folder.name}/rlframework_{name}/worker.py method by method: docs/write_a_backend.md has the way.")
