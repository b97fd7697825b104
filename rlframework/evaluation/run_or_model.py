"""RUN_OR_MODEL of the command line as the configuration that generates with it.

A run's `output_dir` brings its `config.yaml` and its trained model; any other name is a Hugging Face model. What is
compared is asked the same: all subjects of one call share environment, generation and seed, and differ in the model.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.config.load import compose, escape_interpolation
from rlframework.configure import load_config
from rlframework.errors import ConfigError, UserError
from rlframework.evaluation.evaluate import EvaluationSettings, check_out, settle
from rlframework.huggingface.hub import is_path
from rlframework.policy.checkpoint.saved import is_sharded, require_no_native
from rlframework.training.checkpoints import checkpoints_in

if TYPE_CHECKING:
    from rlframework.config.sections import RunConfig
    from rlframework.interfaces.environment import Split

ALONE: Mapping[str, Any] = {
    "generation": {"max_new_tokens": 256},
    "observers": {"console": False, "jsonl": False, "tensorboard": False, "curve": False, "samples": 0},
}
"""What a model alone is asked with, besides the defaults."""

_OVERRIDE = re.compile(r"~[\w-]+(\.[\w-]+)*(=.*)?|[\w-]+(\.[\w-]+)*=.*", re.DOTALL)


@dataclass(frozen=True)
class Subject:
    """A model to be asked. `run` is the directory whose `config.yaml` goes with it, None for a model alone."""

    name: str
    model: str
    run: Path | None


@dataclass(frozen=True)
class EvaluationPlan:
    """What `rlframework evaluate` will do: each of `subjects` with its configuration, into a folder under `out`."""

    subjects: list[Subject]
    configs: list[RunConfig]
    settings: EvaluationSettings
    out: Path

    def folder(self, number: int) -> Path:
        """Where the completions and the summary of the `number`-th subject go: `out`, or of several one each."""
        if len(self.subjects) == 1:
            return self.out
        return self.out / f"{number + 1}-{Path(self.subjects[number].name).name}"


def plan_evaluation(
    words: Sequence[str],
    *,
    config: str | None = None,
    samples: int | None = None,
    attempts: int | None = None,
    k: str = "",
    temperature: float | None = None,
    split: str = "validation",
    out: str | None = None,
) -> EvaluationPlan:
    """The plan that the words and options of the command line come to; whatever is wrong with them is a `UserError`."""
    names, overrides = split_words(words)
    if not names:
        raise UserError("evaluate what? Give the output_dir of a run, or a Hugging Face model directory or name")
    if len(set(names)) < len(names):
        raise UserError(f"{', '.join(names)}: the same thing twice cannot be compared")
    if split not in ("train", "validation"):
        raise UserError(f"--split {split}: it must be train or validation")
    chosen: Split = "train" if split == "train" else "validation"
    subjects = [find_subject(name) for name in names]
    if temperature is not None:
        overrides = [*overrides, f"generation.temperature={temperature}"]
    configs = configurations(subjects, overrides, config=config)
    sampled = any(override.startswith("generation.temperature=") for override in overrides)
    settings = settle(configs[0], split=chosen, samples=samples, attempts=attempts, ks=_numbers(k), sampled=sampled)
    folder = Path(out) if out is not None else _new_folder(subjects)
    check_out(folder)
    return EvaluationPlan(subjects, configs, settings, folder)


def generation_config(
    name: str,
    *,
    overrides: Sequence[str] = (),
    samples: int = 1,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    greedy: bool = False,
    seed: int | None = None,
) -> RunConfig:
    """The configuration that `rlframework generate` asks `name` with; a `UserError` where the options do not fit."""
    if greedy and temperature:
        raise UserError(f"--greedy and --temperature {temperature} contradict each other; give one of them")
    temperature = 0.0 if greedy else temperature
    given = {"generation.temperature": temperature, "generation.max_new_tokens": max_new_tokens, "seed": seed}
    changes = [*overrides, *(f"{key}={value}" for key, value in given.items() if value is not None)]
    alone = {**ALONE, "environment": {"name": "addition"}}  # no data is read
    config = configurations([find_subject(name)], changes, alone=alone)[0]
    if samples > 1 and config.generation.temperature == 0.0:
        raise UserError(f"--samples {samples}: greedy answers are all the same; give --temperature, such as 1")
    return config


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise UserError(
            f"--k {text}: it must be numbers of attempts with commas between them, such as 1,4,8"
        ) from error


def _new_folder(subjects: Sequence[Subject]) -> Path:
    """Of one run: in its directory; else in the working directory. Named for the time, and not there yet."""
    run = subjects[0].run if len(subjects) == 1 else None
    name = datetime.now().strftime("%Y%m%d-%H%M%S")
    parent = Path("evaluations") if run is None else run / "evaluations"
    names = [name, *(f"{name}-{number}" for number in range(2, 1000))]
    return next(parent / name for name in names if not (parent / name).exists())


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The subjects and the overrides (`a.b=value`, `~a.b`) among `words`; what is a directory here is a subject."""
    overrides = [word for word in words if _OVERRIDE.fullmatch(word) and not os.path.isdir(word)]
    return [word for word in words if word not in overrides], overrides


def find_subject(name: str) -> Subject:
    """The run, the checkpoint, or the model that `name` means; a `UserError` where a directory is none of them."""
    path = Path(name)
    for folder in (path, path / "model"):
        require_no_native(folder)
        if is_sharded(folder):
            raise UserError(
                f"{folder} holds the pieces of a sharded checkpoint, which cannot be asked as they are; first make a "
                f"model of them: rlframework convert {name} NEW_FOLDER --to huggingface"
            )
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            raise UserError(
                f"{folder} holds LoRA adapters, which are no model without their base; give the run itself, whose "
                "model is merged when it ends, or merge them with peft's merge_and_unload"
            )
    if (path / "config.json").is_file():
        return Subject(name, name, None)
    is_run, has_model = (path / "config.yaml").is_file(), (path / "model" / "config.json").is_file()
    if is_run and not has_model:
        raise _unfinished(path)
    if is_run:
        return Subject(name, str(path / "model"), path)
    if has_model:  # a checkpoint lies in RUN/checkpoints
        run = path.absolute().parent.parent
        return Subject(name, str(path / "model"), run if (run / "config.yaml").is_file() else None)
    if path.is_dir():
        raise UserError(
            f"{name} is neither a run (it has no config.yaml) nor a model (it has no config.json); give the output_dir "
            "of a run, or a Hugging Face model directory or name"
        )
    if is_path(name) or path.exists():
        raise UserError(f"there is no directory {name}; give the output_dir of a run, or a model directory or name")
    return Subject(name, name, None)


def _unfinished(run: Path) -> UserError:
    found = checkpoints_in(run)
    instead = f"take its newest checkpoint ({found[-1]})" if found else "give the directory of a model"
    return UserError(
        f"{run} holds a run without a trained model: it has not come to its end. Wait for it, or {instead}"
    )


def configurations(
    subjects: Sequence[Subject],
    overrides: Sequence[str] = (),
    *,
    config: str | None = None,
    alone: Mapping[str, Any] = ALONE,
) -> list[RunConfig]:
    """The checked configuration of each subject.

    All are that of `config` (a YAML file), else of the first subject that is a run, else `alone`; each with the
    subject's model and the tokenizer and chat template that lie with it. `overrides` come last.
    """
    if any(re.match(r"~?policy\.model_name\b", override) for override in overrides):
        raise ConfigError("policy.model_name cannot be overridden here: RUN_OR_MODEL says which model it is")
    runs = [subject.run for subject in subjects if subject.run is not None]
    source: str | Path | Mapping[str, Any] = config or (runs[0] / "config.yaml" if runs else alone)
    if config is None and len(runs) > 1:
        told = f"all are asked what {runs[0]} was: its environment, generation settings and seed (--config: others)"
        print(told, file=sys.stderr, flush=True)
    return [_without_training(source, [*_with_model(subject), *overrides]) for subject in subjects]


def _without_training(source: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> RunConfig:
    """The configuration with plain defaults where it is about training: what a trainer must refuse may be asked."""
    values = compose(source, overrides).values
    policy = values.get("policy")  # adapters are merged in a model that is asked
    for section, key in ((values, "recording"), (values, "profiler"), (policy, "scheduler"), (policy, "lora")):
        if isinstance(section, dict):
            section.pop(key, None)
    return load_config(escape_interpolation({**values, "algorithm": {"name": "sft"}}))


def _with_model(subject: Subject) -> list[str]:
    return [
        f"policy.model_name={json.dumps(escape_interpolation(subject.model))}",
        "policy.tokenizer_name=null",
        "policy.chat_template=null",
    ]
