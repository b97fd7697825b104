"""Commands that run something, or write it anew: train, evaluate, generate, convert, tokenize."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rlframework.cli.common import Config, Debug, Json, Out, Overrides, app, print_table
from rlframework.errors import ConfigError, UserError

if TYPE_CHECKING:
    from rlframework.interfaces.algorithm import RunResult

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


def _dry_run(config: str | None, overrides: Sequence[str], resume_from: str | None) -> None:
    if config is None or resume_from is not None:
        raise ConfigError("--dry-run is of a run that starts: rlframework train CONFIG --dry-run")
    from rlframework.configure import load_config
    from rlframework.runner import dry_run

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
    print_table(as_table(plan.subjects, results, plan.settings))
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
