"""RUN_OR_MODEL of the command line as the configuration that generates with it.

A run's `output_dir` brings its `config.yaml` and its trained model; any other name is a Hugging Face model. What is
compared is asked the same: all subjects of one call share environment, generation and seed, and differ in the model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.config.load import escape_interpolation
from rlframework.configure import load_config
from rlframework.data.hub import is_path
from rlframework.errors import ConfigError, UserError

if TYPE_CHECKING:
    from rlframework.config.sections import RunConfig

_OVERRIDE = re.compile(r"~[\w-]+(\.[\w-]+)*(=.*)?|[\w-]+(\.[\w-]+)*=.*", re.DOTALL)


@dataclass(frozen=True)
class Subject:
    """A model to be asked. `run` is the directory whose `config.yaml` goes with it, None for a model alone."""

    name: str
    model: str
    run: Path | None


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The subjects and the overrides (`a.b=value`, `~a.b`) among `words`; what is a directory here is a subject."""
    overrides = [word for word in words if _OVERRIDE.fullmatch(word) and not os.path.isdir(word)]
    return [word for word in words if word not in overrides], overrides


def find_subject(name: str) -> Subject:
    """The run or the model that `name` means; a `UserError` where a directory is neither, or is not there."""
    path = Path(name)
    if (path / "config.json").is_file():
        return Subject(name, name, None)
    if (path / "config.yaml").is_file():
        model = path / "model"
        if not (model / "config.json").is_file():
            raise UserError(
                f"{name} holds a run without a trained model ({model} is not there): it has not come to its end. Wait "
                "for it, or give the directory of a model"
            )
        return Subject(name, str(model), path)
    if path.is_dir():
        raise UserError(
            f"{name} is neither a run (it has no config.yaml) nor a model (it has no config.json); give the output_dir "
            "of a run, or a Hugging Face model directory or name"
        )
    if is_path(name) or path.exists():
        raise UserError(f"there is no directory {name}; give the output_dir of a run, or a model directory or name")
    return Subject(name, name, None)


def configurations(
    subjects: Sequence[Subject],
    overrides: Sequence[str] = (),
    *,
    config: str | None = None,
    defaults: Mapping[str, Any],
) -> list[RunConfig]:
    """The checked configuration of each subject.

    All are that of `config` (a YAML file), else of the first subject that is a run, else `defaults`; each with the
    subject's model and the tokenizer and chat template that lie with it. `overrides` come last.
    """
    if any(re.match(r"~?policy\.model_name\b", override) for override in overrides):
        raise ConfigError("policy.model_name cannot be overridden here: RUN_OR_MODEL says which model it is")
    runs = [subject.run for subject in subjects if subject.run is not None]
    source: str | Path | Mapping[str, Any] = config or (runs[0] / "config.yaml" if runs else defaults)
    return [load_config(source, [*_with_model(subject), *overrides]) for subject in subjects]


def shared_source(subjects: Sequence[Subject], config: str | None) -> str | None:
    """Where the settings come from, where that is not each subject's own place; else None."""
    runs = [subject for subject in subjects if subject.run is not None]
    if config is not None or not runs or len(subjects) == 1:
        return None
    return runs[0].name


def _with_model(subject: Subject) -> list[str]:
    return [
        f"policy.model_name={json.dumps(escape_interpolation(subject.model))}",
        "policy.tokenizer_name=null",
        "policy.chat_template=null",
    ]
