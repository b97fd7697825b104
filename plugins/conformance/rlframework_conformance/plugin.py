"""The plugin of this distribution: the commands `rlframework conformance` and `rlframework parity`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer import Argument, Option

from rlframework.base.errors import UserError
from rlframework.cli.common import Debug, TrustRun, print_table
from rlframework.plugins.hookspec import hookimpl


@hookimpl
def rlframework_commands(app: typer.Typer) -> None:
    """Add `conformance` and `parity`."""
    app.command()(conformance)
    app.command()(parity)


def conformance(
    backend: Annotated[str, Argument(help="Name of a plugin: dtensor, ray, addition, ...")],
    keys: Annotated[list[str] | None, Argument(help="Settings of the plugin's own section, such as path=x.")] = None,
    workers: Annotated[int | None, Option(help="Test only layouts with this many workers.")] = None,
    layout: Annotated[list[str] | None, Option(help="Layout to test, such as data=2,tensor=2. Repeatable.")] = None,
    device: Annotated[str, Option(help="Device to test on: cpu or cuda.")] = "cpu",
    json_file: Annotated[str | None, Option("--json", metavar="FILE", help="Write all measurements as JSON.")] = None,
    markdown: Annotated[str | None, Option(metavar="FILE", help="Write the results as Markdown tables.")] = None,
    test: Annotated[list[str] | None, Option(metavar="NAME", help="Run only this test. Repeatable.")] = None,
    as_list: Annotated[bool, Option("--list", help="List the tests without running them.")] = False,
    mutants: Annotated[bool, Option("--mutants", help="Check the suites: broken implementations must fail.")] = False,
    kill_matrix: Annotated[
        str | None, Option(metavar="FILE", help="Try each mutant with each test; FILE has the results so far.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run the conformance suites for the plugin BACKEND, in every layout that it declares.

    Exit code 0: the plugin conforms; with --test, the selected tests pass (the verdict is then INCOMPLETE); with
    --mutants, every mutant is caught. 1: it does not. 2: the suites could not be run.

    \b
    rlframework conformance dtensor --workers 2
    rlframework conformance dtensor --layout tensor=2 --layout data=2,tensor=2 --json dtensor.json
    rlframework conformance gsm8k train_path=train.jsonl validation_path=test.jsonl
    rlframework conformance dtensor --list
    rlframework conformance microbatches --kill-matrix matrix.jsonl
    """
    from rlframework_conformance.command import Request, run, table_of_tests

    outputs = (json_file, markdown)
    request = Request(
        backend,
        workers,
        layout or (),
        device,
        *outputs,
        test or (),
        mutants=mutants or kill_matrix is not None,
        keys=keys or (),
        matrix=kill_matrix,
    )
    if as_list:
        print_table(table_of_tests(request))
    else:
        raise typer.Exit(run(request))


def parity(
    backends: Annotated[
        list[str] | None,
        Argument(
            metavar="BACKEND[:LAYOUT][/KEY=VALUE]...",
            help="Such as dtensor:data=2, or deepspeed/zero_optimization.stage=3. Default: all installed backends.",
        ),
    ] = None,
    model: Annotated[str | None, Option(metavar="DIR", help="Model directory. Default: a tiny random model.")] = None,
    steps: Annotated[int | None, Option(help="Optimizer steps. Default: 20.")] = None,
    rows: Annotated[int | None, Option(help="Rows per step. Default: 8.")] = None,
    precision: Annotated[list[str] | None, Option(help="float32 or bfloat16. Repeatable.")] = None,
    batching: Annotated[list[str] | None, Option(help="padded, dynamic or packed. Repeatable.")] = None,
    checkpointing: Annotated[bool, Option("--checkpointing", help="Also compare activation checkpointing.")] = False,
    algorithm: Annotated[
        list[str] | None,
        Option(metavar="NAME[/KEY=VALUE]...", help="Compare steps of an algorithm, such as dpo/beta=0.2. Repeatable."),
    ] = None,
    device: Annotated[str, Option(help="Device to compare on: cpu or cuda.")] = "cpu",
    run: Annotated[str | None, Option("--replay", metavar="RUN_DIR", help="Replay a recorded step of a run.")] = None,
    step: Annotated[int | None, Option(help="Step to replay.")] = None,
    trust_run: TrustRun = False,
    json_file: Annotated[str | None, Option("--json", metavar="FILE", help="Write all results as JSON.")] = None,
    debug: Debug = False,
) -> None:
    """Compare backends with a reference implementation: log-probabilities, loss, gradient norm and final weights."""
    if (run is None) != (step is None):
        raise UserError("--replay RUN_DIR and --step N must be given together: a run, and the recorded step to replay")
    given = {"--model": model, "--steps": steps, "--rows": rows, "--batching": batching, "--algorithm": algorithm}
    given["--checkpointing"] = checkpointing or None
    if run is not None and (wrong := [name for name, value in given.items() if value is not None]):
        named = ", ".join(wrong)
        raise UserError(f"{named} cannot be combined with --replay: the recorded step determines the computation")
    from rlframework_conformance.parity import command

    common: dict[str, Any] = {"precisions": precision or (), "device": device, "json_file": json_file}
    if run is not None and step is not None:
        raise typer.Exit(command.replay(run, step, backends or (), trust_run=trust_run, **common))
    common |= {name: value for name, value in (("steps", steps), ("rows", rows)) if value is not None}
    common |= {"modes": batching or (), "checkpointing": checkpointing, "algorithms": algorithm or ()}
    raise typer.Exit(command.parity(backends or (), model=model, **common))
