"""Command for the first steps: init."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer import Argument, Option

from rlframework.base.errors import UserError
from rlframework.cli.common import Debug

if TYPE_CHECKING:
    from rlframework_tools.new_config import Answers

Value = TypeVar("Value", str, int)


def init(
    file: Annotated[str | None, Argument(help="File to write. Default: ALGORITHM.yaml.")] = None,
    algorithm: Annotated[str | None, Option(metavar="NAME", help="As `rlframework plugins algorithm` lists.")] = None,
    gpus: Annotated[int | None, Option(min=0, max=1024, help="GPUs of this machine; 0: a laptop.")] = None,
    model: Annotated[str | None, Option(metavar="MODEL", help="Directory, or name on the Hugging Face Hub.")] = None,
    data: Annotated[
        str | None, Option(metavar="DATA", help="addition, gsm8k, or your rows: a file, a folder or a name on the Hub.")
    ] = None,
    reward: Annotated[
        str | None, Option(metavar="REWARD", help="Of your rows: math, exact, or your function, my_rewards:score.")
    ] = None,
    teacher: Annotated[str | None, Option(metavar="MODEL", help="Teacher of a distillation.")] = None,
    batch: Annotated[int | None, Option(min=1, help="Completions or rows of a step.")] = None,
    yes: Annotated[bool, Option("--yes", help="Ask nothing: use the defaults of what is not given.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace FILE.")] = False,
    debug: Debug = False,
) -> None:
    """Write a configuration with a comment for each key, from a few questions: those whose options are not given.

    \b
    rlframework init
    rlframework init grpo.yaml --algorithm grpo --model Qwen/Qwen3-0.6B --data gsm8k --gpus 1 --yes
    rlframework init dpo.yaml --algorithm dpo --data pairs.jsonl --gpus 0 --yes
    """
    from rlframework_tools.new_config import write_config

    given = {"algorithm": algorithm, "gpus": gpus, "model": model, "data": data, "reward": reward, "teacher": teacher}
    ask = _Questions({**given, "batch": batch}, yes=yes)
    answers = _answers(ask)
    path = Path(file or f"{answers.algorithm.name.rpartition(':')[2]}.yaml")
    replaced = path.exists()
    if replaced and not overwrite and ask.on_terminal:
        overwrite = typer.confirm(f"{path} exists. Replace it?")
    commands = write_config(answers, path, overwrite=overwrite)
    print(f"{'replaced' if replaced else 'wrote'} {path}. Next:\n\n" + "\n".join(f"  {line}" for line in commands))


class _Questions:
    """Asks on the terminal what is not `given`, the values of options by name, or with `yes` takes the defaults."""

    def __init__(self, given: Mapping[str, Any], *, yes: bool) -> None:
        self.given, self.yes = given, yes

    @property
    def on_terminal(self) -> bool:
        """Whether there is somebody to ask."""
        return not self.yes and sys.stdin.isatty()

    def answer(self, option: str, text: str, default: Value | None) -> Value:
        """The value of `option`, if it is given; otherwise the answer to `text`."""
        given: Value | None = self.given[option]
        if given is not None:
            return given
        if self.yes and default is not None:
            return default
        if not self.on_terminal:
            others = "" if default is None else ", or --yes to use defaults"
            raise UserError(f"there is no answer to {text!r}: give --{option}{others}")
        answer: Value = typer.prompt(text, default=default)
        return answer


def _answers(ask: _Questions) -> Answers:
    from rlframework_tools.new_config import ADDITION, GSM8K, MODELS, Algorithm, Answers, default_batch

    of = Algorithm.named(ask.answer("algorithm", "algorithm, such as grpo, sft or dpo", "grpo"))
    gpus = ask.answer("gpus", "GPUs of this machine, 0 for a laptop", 0)
    if gpus < 0:
        raise UserError(f"{gpus} GPUs: give 0 for a laptop, or their number")
    model = ask.answer("model", "model, a directory or a name on the Hugging Face Hub", MODELS[gpus > 0])
    rows = "pairs" if of.on_pairs else "addition, gsm8k, or rows"
    data = ask.answer("data", f"{rows}: a file or a name on the Hub", None if of.on_pairs else ADDITION)
    reward, teacher = ask.given["reward"], ask.given["teacher"]
    if of.samples_per_prompt and data not in (ADDITION, GSM8K):
        reward = ask.answer("reward", "reward: math, exact, or a function such as my_rewards:score", "math")
    elif reward is not None:
        raise UserError(f"--reward is for an algorithm that scores completions, on your own rows: remove {reward!r}")
    if of.has_teacher:
        teacher = ask.answer("teacher", "teacher, a directory or a name on the Hub", None)
    elif teacher is not None:
        raise UserError(f"--teacher is for a distillation: remove {teacher!r}")
    count = "completions" if of.samples_per_prompt else "rows"
    batch = ask.answer("batch", f"{count} of a step", default_batch(gpus))
    return Answers(of, gpus, model, data, reward, teacher, batch)
