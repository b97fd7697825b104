"""The command line: each command calls into a room. Nothing heavy is imported before a command runs.

Exit codes: 0; 2 for a mistake in what was given (`UserError`, or bad arguments); 1 for any other failure; 130 for
Ctrl-C.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rlframework import __version__
from rlframework.errors import ConfigError, RLFrameworkError, UserError

if TYPE_CHECKING:
    from rlframework.interfaces.algorithm import RunResult


def main(args: Sequence[str] | None = None) -> None:
    """The entry point `rlframework`. Ends with `SystemExit`."""
    app(args=list(args) if args is not None else None, prog_name="rlframework")


class _Group(TyperGroup):
    """Turns what commands raise into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command of `ctx`."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            _tell(str(error) or "interrupted", error, ctx)
            raise typer.Exit(getattr(error, "exit_code", 130)) from None
        except RLFrameworkError as error:
            _tell(f"error: {error}", error, ctx)
            raise typer.Exit(2 if isinstance(error, UserError) else 1) from None
        except Exception as error:
            if type(error).__module__.partition(".")[0] in ("typer", "click") or isinstance(error, BrokenPipeError):
                raise  # bad arguments, and the end of the output's reader: typer's to tell
            name = type(error).__name__
            _tell(f"error: {name}: {error}\nThis was not expected. --debug shows where it happened.", error, ctx)
            raise typer.Exit(1) from None


def _tell(message: str, error: BaseException, ctx: Any) -> None:
    if ctx.find_root().meta.get(_DEBUG):
        traceback.print_exception(error)
    print(message, file=sys.stderr)


_DEBUG = "rlframework.debug"
_TELLING = ("loss", "reward", "accuracy")


def _set_debug(ctx: typer.Context, value: bool) -> bool:
    """Before the command's name and after it: either one counts."""
    if value:
        ctx.find_root().meta[_DEBUG] = True
    return value


def _show_version(value: bool) -> None:
    if value:
        print(f"rlframework {__version__}")
        raise typer.Exit


Config = Annotated[str, typer.Argument(help="A YAML file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="Such as policy.backend=dtensor; ~a.b takes a key out.")]
Out = Annotated[str, typer.Argument(help="A folder that is not there yet.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.", callback=_set_debug)]
Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
]

app = typer.Typer(
    cls=_Group, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


@app.callback()
def root(debug: Debug = False, version: Version = False) -> None:
    """RL post-training of language models, with the training backend as a plugin."""


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
        from rlframework.runner import resume

        changes = [word for word in (config, *(overrides or ())) if word is not None]
        print(_summary(resume(resume_from, changes), resume_from))
        return
    if config is None:
        raise ConfigError("give the YAML file of the run: rlframework train CONFIG, or --resume RUN_DIR")
    from rlframework.configure import load_config
    from rlframework.runner import run

    resolved = load_config(config, overrides or ())
    print(_summary(run(resolved), str(resolved.output_dir)))


@app.command()
def evaluate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_OR_MODEL|a.b=value",
            help="A run's output_dir (or a checkpoint in it), or a Hugging Face model directory or name; more of them "
            "are compared. And settings.",
            show_default=False,
        ),
    ],
    config: Annotated[str | None, typer.Option(metavar="FILE", help="A YAML file; none: the run's.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.", show_default=False)] = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="Answers to each prompt (1).", show_default=False)] = None,
    k: Annotated[str, typer.Option(metavar="1,4,8", help="Tell pass@k of these.", show_default=False)] = "",
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sample; one attempt is greedy otherwise.", show_default=False)
    ] = None,
    split: Annotated[str, typer.Option(help="validation or train.")] = "validation",
    out: Annotated[str | None, typer.Option(metavar="DIR", help="A folder that is not there yet.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Ask a model the held-out prompts; tell accuracy, pass@k and reward with 95 % intervals, keep every completion.

    \b
    rlframework evaluate runs/quickstart
    rlframework evaluate runs/quickstart --attempts 8 --k 1,4,8 --temperature 0.8
    rlframework evaluate models/base runs/quickstart --samples 200
    rlframework evaluate models/base environment.name=gsm8k environment.validation_path=test.jsonl
    """
    from rlframework.algorithms.subjects import plan_evaluation

    plan = plan_evaluation(
        words, config=config, samples=samples, attempts=attempts, k=k, temperature=temperature, split=split, out=out
    )
    from rlframework.algorithms.evaluation_report import as_json as json_of
    from rlframework.algorithms.evaluation_report import as_table
    from rlframework.observers.counting import counting
    from rlframework.runner import evaluate as run_plan

    results, summaries = run_plan(plan, progress=counting)
    if as_json:
        print(json.dumps(json_of(plan.subjects, results, summaries), indent=2, allow_nan=False))
        return
    _print_table(as_table(plan.subjects, results, plan.settings))
    print(f"done; completions and summary in {plan.out}")


@app.command()
def generate(
    name: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL",
            help="A run's output_dir, or a Hugging Face model directory or name.",
            show_default=False,
        ),
    ],
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="None: from stdin, a line each.", show_default=False)
    ] = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="A prompt a line, or JSONL with `prompt` or `messages`.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each prompt.")] = 1,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="None: the run's, or 1.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="None: the run's, or 256.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="The likeliest token each time.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Without the chat template.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="None: the run's, or 0.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=value", help="Another setting; again for more.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each answer.")] = False,
    debug: Debug = False,
) -> None:
    """Answer prompts with a model: those given, those of a file, or what is typed, until Ctrl-D.

    \b
    rlframework generate runs/quickstart "3+4=" "12+9="
    rlframework generate runs/quickstart --file prompts.jsonl --samples 4 --json > answers.jsonl
    rlframework generate HuggingFaceTB/SmolLM2-135M-Instruct --greedy
    echo "Once upon a time" | rlframework generate models/base --raw --max-new-tokens 50
    """
    if prompts and file is not None:
        raise UserError("give prompts or --file, not both")
    from rlframework.algorithms.subjects import generation_config

    config = generation_config(
        name,
        overrides=changes or (),
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        greedy=greedy,
        seed=seed,
    )
    from rlframework.algorithms.answering import prompts_of_file, prompts_of_words
    from rlframework.algorithms.talking import show, talk
    from rlframework.runner import build_answerer

    typed = not prompts and file is None and sys.stdin.isatty()
    given = [] if typed else prompts_of_words(prompts) if prompts else prompts_of_file(file or "-")
    with build_answerer(config, samples=samples, raw=raw) as answerer:
        if typed:
            talk(answerer, as_json=as_json)
        else:
            show(answerer, given, as_json=as_json)


def _dry_run(config: str | None, overrides: Sequence[str], resume_from: str | None) -> None:
    if config is None or resume_from is not None:
        raise ConfigError("--dry-run is of a run that starts: rlframework train CONFIG --dry-run")
    from rlframework.configure import load_config
    from rlframework.runner import dry_run

    found = dry_run(load_config(config, overrides))
    _print_table(found.table())
    for warning in found.warnings():
        print(warning, file=sys.stderr)
    print("checked: nothing was started and nothing written")


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
    from rlframework.algorithms.converting import convert as run
    from rlframework.observers.counting import counting

    with counting("tensors") as progress:
        done = run(source, dest, to, overwrite=overwrite, progress=progress)
    print(done.told())


@app.command()
def tokenize(config: Config, out: Out, overrides: Overrides = None, debug: Debug = False) -> None:
    """Render the training rows of CONFIG once, into the folder OUT, for algorithm.token_data."""
    from rlframework.configure import load_config
    from rlframework.observers.counting import counting

    resolved = load_config(config, overrides or ())
    with counting("rows") as progress:
        from rlframework.algorithms.tokenizing import tokenize as write

        meta = write(resolved, out, progress=progress).meta
    print(
        f"done: {meta['rows']:,} rows of at most {meta['longest']:,} tokens, {meta['tokens']:,} in all, of which "
        f"{meta['trained_tokens']:,} are trained on; in {out}"
    )


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
    _print_table(as_table(rows))


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
    from rlframework.doctor import showing
    from rlframework.doctor.examine import examine

    found = examine(config, overrides or ())
    if as_json:
        print(showing.as_json(found))
    else:
        _print_table(showing.as_table(found))
        print(showing.summary(found))
    raise typer.Exit(found.exit_code)


def _print_table(table: Any) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


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
        _print_table(table_of_tests(request))
    else:
        raise typer.Exit(run(request))


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


def _summary(result: RunResult, output_dir: str) -> str:
    """One line: how well it went at the end, and where the run lies."""
    values = ", ".join(
        f"{name}={value:.4g}" for name, value in result.metrics.items() if name.rpartition("/")[2] in _TELLING
    )
    return f"done: {values}; in {output_dir}" if values else f"done; in {output_dir}"


if __name__ == "__main__":
    main()
