"""`rlframework init`: writes a configuration with a comment for each key, from the answers to a few questions.

The comments are the descriptions of the keys in the models of the sections, so plugins' keys have theirs too.

Not supported: environments of several turns, generation workers, layouts other than data parallelism.
"""

from __future__ import annotations

import inspect
import math
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel
from typer import Argument, Option

from rlframework.base.errors import ConfigError, UserError
from rlframework.base.files import write_atomically
from rlframework.cli.common import Debug
from rlframework.config.sections import AlgorithmConfig
from rlframework.config.yaml_text import parse_yaml, to_yaml
from rlframework.plugins.configure import load_config
from rlframework.plugins.manager import create_manager
from rlframework.plugins.types import AlgorithmRecord

Value = TypeVar("Value", str, int)

ADDITION, GSM8K = "addition", "gsm8k"
"""The data that has a name; any other is a file, a folder or the name of a dataset."""

MODELS = ("HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-0.6B")
"""The default models: for a CPU, and for GPUs."""

_HEADS = {"reward_model": "score", "process_reward_model": "value"}
_LEARNING_RATES = {"sft": 1e-5, "distillation": 5e-6, **dict.fromkeys(_HEADS, 1e-5)}
_LEARNING_RATE = 1e-6
"""Of all other algorithms; as in examples/recipes."""
_WIDTH = 100


@dataclass(frozen=True)
class Algorithm:
    """The algorithm `name`, with what the questions depend on."""

    name: str
    samples_per_prompt: int
    """Completions of a prompt, which get a reward; 0: the algorithm does not score completions."""
    on_pairs: bool
    has_teacher: bool

    @classmethod
    def named(cls, name: str) -> Algorithm:
        """Return the algorithm `name`, of core or of a plugin. Raises `PluginError` if there is none."""
        model = create_manager().select(AlgorithmRecord.kind, name).record.config_model or AlgorithmConfig
        sampled = model.model_fields.get("samples_per_prompt")
        on_pairs = issubclass(model, AlgorithmConfig) and model.on_preferences
        return cls(name, sampled.default if sampled else 0, on_pairs, name == "distillation")


@dataclass(frozen=True)
class Answers:
    """The answers to the questions."""

    algorithm: Algorithm
    gpus: int
    model: str
    data: str
    reward: str | None
    """`math`, `exact`, or the import path of a function; None where completions are not scored."""
    teacher: str | None
    batch: int


def default_batch(gpus: int) -> int:
    """Return the rows of a step: at least 256 on GPUs, and 8, a group of completions, on each of them."""
    return 8 * gpus * math.ceil(256 / (8 * gpus)) if gpus else 64


def write_config(answers: Answers, path: Path, *, overwrite: bool = False) -> list[str]:
    """Write the configuration to `path`; return the next commands.

    Raises `ConfigError`, and writes nothing, if the file exists and `overwrite` is false, or if the configuration has
    problems.
    """
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists: give another FILE, or replace it with --overwrite")
    values = config_values(answers)
    text = commented_yaml(values, load_config(values), str(path))
    load_config(parse_yaml(text, str(path)).values)
    write_atomically(path, text)
    file, folder = shlex.quote(str(path)), shlex.quote(values["output_dir"])
    check = f"rlframework train {file} --dry-run"
    return [f"rlframework config {file}", check, f"rlframework train {file}", f"rlframework report {folder}"]


def config_values(answers: Answers) -> dict[str, Any]:
    """Return the keys of the configuration and their values."""
    algorithm, gpus = answers.algorithm, answers.gpus
    name = algorithm.name
    policy: dict[str, Any] = {"model_name": answers.model}
    if name in _HEADS:
        policy |= {"head": _HEADS[name], "head_init": "zeros"}
    policy["train_global_batch_size"] = answers.batch
    policy["optimizer"] = {"lr": _LEARNING_RATES.get(name, _LEARNING_RATE)}
    values = {
        "output_dir": f"runs/{name.rpartition(':')[2]}",
        "device": "auto" if gpus else "cpu",
        "algorithm": _algorithm(answers),
        "environment": _environment(answers),
        "policy": policy,
        "critic": {"optimizer": {"lr": 1e-5}} if name == "ppo" else None,
        "teacher": {"model_name": answers.teacher} if answers.teacher else None,
        "generation": None if algorithm.on_pairs else {"max_new_tokens": _completion_tokens(answers)},
        "worker_group": {"name": "processes", "num_workers": gpus} if gpus > 1 else {"name": "inline"},
        "checkpoints": {"every": 50, "keep_last": 2},
    }
    return {key: value for key, value in values.items() if value is not None}


def _algorithm(answers: Answers) -> dict[str, Any]:
    values: dict[str, Any] = {"name": answers.algorithm.name, "num_steps": 100}
    if per_prompt := answers.algorithm.samples_per_prompt:
        if answers.batch % per_prompt:
            near = max(answers.batch - answers.batch % per_prompt, per_prompt)
            message = f"a step has {per_prompt} completions of each prompt, so the batch must be a multiple of that"
            raise ConfigError(f"--batch {answers.batch}: {message}, such as {near}")
        values |= {"prompts_per_step": answers.batch // per_prompt, "samples_per_prompt": per_prompt}
    if answers.algorithm.on_pairs:
        values["max_tokens"] = 1024
    return {**values, "validation": {"every": 20, "samples": 64}}


def _environment(answers: Answers) -> dict[str, Any]:
    if answers.algorithm.on_pairs:
        return {"name": "preferences", "path": answers.data}
    if answers.data == ADDITION:
        return {"name": ADDITION, "digits": 2, "answer": "last_integer"}  # a chat model answers with a sentence
    if answers.data == GSM8K:
        return {"name": GSM8K, "dataset": "openai/gsm8k"}
    rows = {"name": "dataset", "path": answers.data}
    if answers.reward is None:
        return rows
    return rows | {"reward" if ":" in answers.reward else "check": answers.reward}


def _completion_tokens(answers: Answers) -> int:
    return 32 if answers.data == ADDITION else 1024 if answers.gpus else 256


def commented_yaml(values: Mapping[str, Any], config: BaseModel, path: str) -> str:
    """Return `values` as YAML with a comment above each key: its description in the model of `config`."""
    head = f"# `rlframework config {shlex.quote(path)}` prints the keys that are left out too, with their defaults."
    sections = (lines for key in values for lines in ("", *_commented({key: values[key]}, config, "")))
    return "\n".join([head, *sections]) + "\n"


def _commented(values: Mapping[str, Any], section: BaseModel, indent: str) -> Iterator[str]:
    for key, value in values.items():
        inner = getattr(section, key)
        text = type(section).model_fields[key].description or _summary(inner)
        mark = f"{indent}# "
        yield from textwrap.wrap(text, _WIDTH, initial_indent=mark, subsequent_indent=mark, break_long_words=False)
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _commented(value, inner, f"{indent}  ")
        else:
            yield from textwrap.indent(to_yaml({key: value}).rstrip("\n"), indent).split("\n")


def _summary(section: object) -> str:
    """The first paragraph of the docstring of the section's model."""
    return " ".join((inspect.getdoc(type(section)) or "").partition("\n\n")[0].split())


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
