"""Commands that use a trained model: evaluate, generate."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from rlframework.cli.common import Debug, Json, app, print_table
from rlframework.errors import UserError


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
    from rlframework.evaluation.run_or_model import plan_evaluation

    plan = plan_evaluation(
        words, config=config, samples=samples, attempts=attempts, k=k, temperature=temperature, split=split, out=out
    )
    from rlframework.evaluation.report import as_json as json_of
    from rlframework.evaluation.report import as_table
    from rlframework.observers.progress import counting
    from rlframework.runner.launch import evaluate as run_plan

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
    from rlframework.evaluation.run_or_model import generation_config

    config = generation_config(
        name,
        overrides=changes or (),
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        greedy=greedy,
        seed=seed,
    )
    from rlframework.evaluation.completions import prompts_of_file, prompts_of_words
    from rlframework.evaluation.interactive import show, talk
    from rlframework.runner.launch import build_answerer

    typed = not prompts and file is None and sys.stdin.isatty()
    given = [] if typed else prompts_of_words(prompts) if prompts else prompts_of_file(file or "-")
    with build_answerer(config, samples=samples, raw=raw) as answerer:
        if typed:
            talk(answerer, as_json=as_json)
        else:
            show(answerer, given, as_json=as_json)
