"""Commands that use a trained model: evaluate, generate."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from rlframework.base.errors import UserError
from rlframework.cli.common import Debug, Json, OldOverrides, TrustRun, print_table, with_old_overrides

if TYPE_CHECKING:
    from rlframework.config.sections import RunConfig
    from rlframework_tools.evaluation.plan import BestOfPlan


def evaluate(
    words: Annotated[
        list[str],
        Argument(
            metavar="RUN_OR_MODEL|a.b=value",
            help="A run's output_dir, a checkpoint in it, or a model directory or name. Also settings to override.",
        ),
    ],
    config: Annotated[str | None, Option(metavar="FILE", help="YAML file. Default: the run's configuration.")] = None,
    samples: Annotated[int | None, Option(min=1, help="Evaluate only the first N prompts.")] = None,
    attempts: Annotated[int | None, Option(min=1, max=1_000_000, help="Completions per prompt. Default: 1.")] = None,
    k: Annotated[str, Option(metavar="1,4,8", help="Report pass@k for these k.", show_default=False)] = "",
    temperature: Annotated[float | None, Option(min=0.0, help="Temperature. Default: greedy for one attempt.")] = None,
    split: Annotated[str, Option(help="Data to evaluate on: validation or train.")] = "validation",
    out: Annotated[str | None, Option(metavar="DIR", help="New folder to write the results to.")] = None,
    trust_run: TrustRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Evaluate models on held-out prompts: accuracy, pass@k and reward with 95 % confidence intervals.

    All completions are saved.

    \b
    rlframework evaluate runs/quickstart
    rlframework evaluate runs/quickstart --attempts 8 --k 1,4,8 --temperature 0.8
    rlframework evaluate models/base runs/quickstart --samples 200
    rlframework evaluate models/base environment.name=gsm8k environment.validation_path=test.jsonl
    """
    from rlframework_tools.evaluation.plan import plan_evaluation

    plan = plan_evaluation(
        words,
        config=config,
        samples=samples,
        attempts=attempts,
        k=k,
        temperature=temperature,
        split=split,
        out=out,
        trust_run=trust_run,
    )
    from rlframework_tools.command_output import progress_bar
    from rlframework_tools.evaluation.evaluate import evaluate_models
    from rlframework_tools.evaluation.report import as_table

    results, output = evaluate_models(plan, progress_bar)
    if as_json:
        print(json.dumps(output, indent=2, allow_nan=False))
        return
    print_table(as_table(plan, results))
    print(f"done; completions and summary in {plan.out}")


def generate(
    name: Annotated[str, Argument(metavar="RUN_OR_MODEL", help="A run's output_dir, or a model directory or name.")],
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="PROMPT|a.b=value",
            help="Prompts. Default: lines of stdin. Also settings; a prompt that reads like one: in --file.",
        ),
    ] = None,
    file: Annotated[
        str | None,
        Option(metavar="FILE", help="Text file with one prompt per line, or JSONL with `prompt` or `messages`."),
    ] = None,
    samples: Annotated[int, Option(min=1, max=1_000_000, help="Completions per prompt.")] = 1,
    temperature: Annotated[float | None, Option(min=0.0, help="Temperature. Default: the run's, or 1.")] = None,
    max_new_tokens: Annotated[int | None, Option(min=1, help="Maximum tokens. Default: the run's, or 256.")] = None,
    greedy: Annotated[bool, Option("--greedy", help="Always choose the most likely token.")] = False,
    raw: Annotated[bool, Option("--raw", help="Do not apply the chat template.")] = False,
    seed: Annotated[int | None, Option(min=0, help="Random seed. Default: the run's, or 0.")] = None,
    old_overrides: OldOverrides = None,
    trust_run: TrustRun = False,
    as_json: Annotated[bool, Option("--json", help="Print one line of JSON per completion.")] = False,
    best_of: Annotated[
        int | None,
        Option(metavar="N", min=1, max=1_000_000, help="Of N completions of each prompt, write the best to --out."),
    ] = None,
    out: Annotated[str | None, Option(metavar="FILE.jsonl", help="With --best-of: new file for the rows.")] = None,
    min_reward: Annotated[
        float | None, Option(help="With --best-of: leave out prompts whose best reward is less.")
    ] = None,
    split: Annotated[str, Option(help="With --best-of: prompts to use, train or validation.")] = "train",
    limit: Annotated[int | None, Option(min=1, help="With --best-of: use only the first N prompts.")] = None,
    config: Annotated[
        str | None, Option(metavar="FILE", help="With --best-of: YAML file. Default: the run's configuration.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Generate completions for prompts given as arguments, in a file, or typed interactively until Ctrl-D.

    With --best-of N, of the environment's prompts: the best of N completions each is written as a row to train on.

    \b
    rlframework generate runs/quickstart "3+4=" "12+9="
    rlframework generate runs/quickstart --file prompts.jsonl --samples 4 --json > answers.jsonl
    rlframework generate HuggingFaceTB/SmolLM2-135M-Instruct policy.precision=bfloat16 --greedy
    echo "Once upon a time" | rlframework generate models/base --raw --max-new-tokens 50
    rlframework generate runs/quickstart --best-of 8 --min-reward 1 --out best.jsonl
    """
    from rlframework.runner.models import generation_config
    from rlframework_tools.evaluation.plan import plan_best_of, split_words

    overrides, prompts = split_words(words or ())
    if best_of is None and (out, min_reward, split, limit, config) != (None, None, "train", None, None):
        raise UserError("--out, --min-reward, --split, --limit and --config are options of --best-of; give it too")
    if best_of is not None and (prompts or file is not None or samples != 1 or greedy or raw or as_json):
        raise UserError(
            "--best-of samples the environment's prompts: leave out prompts, --file, --samples, --greedy, --raw, --json"
        )
    if prompts and file is not None:
        raise UserError("give either prompts or --file, not both")
    plan = None
    if best_of is not None:
        plan = plan_best_of(best_of, out, split=split, limit=limit, min_reward=min_reward)
    loaded = generation_config(
        name,
        overrides=with_old_overrides(overrides, old_overrides),
        config=config,
        samples=samples,
        best_of=best_of,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        greedy=greedy,
        seed=seed,
        trust_run=trust_run,
    )
    if plan is not None:
        _write_best(loaded, plan)
        return
    from rlframework.runner.parts import build_generation
    from rlframework_tools.evaluation.answers import Answerer, read_prompts

    typed = not prompts and file is None and sys.stdin.isatty()
    given = [] if typed else read_prompts(prompts, file or "-")
    with build_generation(loaded) as (tokenizer, _, generation):
        answerer = Answerer(loaded, tokenizer, generation, samples=samples, raw=raw, as_json=as_json)
        if typed:
            answerer.chat()
        else:
            answerer.answer(given)


def _write_best(config: RunConfig, plan: BestOfPlan) -> None:
    from rlframework_tools.command_output import progress_bar
    from rlframework_tools.evaluation.evaluate import build_evaluation

    with progress_bar("completions") as progress, build_evaluation(config) as parts:
        from rlframework_tools.evaluation.best_of import best_of

        result = best_of(parts, plan, progress=progress)
    print(f"done: {result}; in {plan.out}")
