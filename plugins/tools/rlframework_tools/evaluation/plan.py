"""Turn the arguments of `rlframework evaluate` and `generate` into plans."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlframework.algorithms.intervals import default_ks
from rlframework.base.errors import ConfigError, UserError
from rlframework.base.files import check_writable
from rlframework.runner.models import ModelSource, configurations, find_model
from rlframework_tools.command_output import check_new_folder

if TYPE_CHECKING:
    from rlframework.config.sections import RunConfig
    from rlframework.interfaces.environment import Split

_LOG = logging.getLogger(__name__)

_OVERRIDE = re.compile(r"~[\w-]+(\.[\w-]+)*(=.*)?|[\w-]+(\.[\w-]+)*=.*", re.DOTALL)


@dataclass(frozen=True)
class EvaluationPlan:
    """The work of `rlframework evaluate`: the `models` with a configuration each, and the output folder.

    Evaluates the first `samples` prompts of `split` (None: all), with `attempts` completions each, and reports pass@k
    for `ks`.
    """

    models: list[ModelSource]
    configs: list[RunConfig]
    out: Path
    split: Split
    samples: int | None
    attempts: int
    ks: tuple[int, ...]
    greedy: bool

    def folder(self, number: int) -> Path:
        """The folder for the completions and summary of model `number`: `out` for one model, else a folder in it."""
        if len(self.models) == 1:
            return self.out
        return self.out / f"{number + 1}-{Path(self.models[number].name).name}"


@dataclass(frozen=True)
class BestOfPlan:
    """The work of `rlframework generate --best-of`: a row for each of the first `limit` prompts of `split` (None: all).

    Of `candidates` completions the best is written to `out`, if its reward is at least `min_reward`.
    """

    candidates: int
    out: Path
    split: Split
    limit: int | None
    min_reward: float | None

    @property
    def partial(self) -> Path:
        """The file that has the rows until they are complete."""
        return self.out.with_suffix(f".partial{self.out.suffix}")


def plan_best_of(
    candidates: int, out: str | None, *, split: str = "train", limit: int | None = None, min_reward: float | None = None
) -> BestOfPlan:
    """Build the plan from the options of the command line. Invalid ones raise `UserError`."""
    if out is None:
        raise UserError("--best-of writes rows: give --out FILE.jsonl, a file that does not exist yet")
    path = Path(out)
    if path.suffix != ".jsonl":
        raise UserError(f"--out {out}: the name must end with .jsonl, by which environment.name=dataset knows the form")
    if min_reward is not None and not isfinite(min_reward):
        raise UserError(f"--min-reward {min_reward}: it must be a finite number")
    plan = BestOfPlan(candidates, path, _split_of(split), limit, min_reward)
    for file in (plan.out, plan.partial):
        if os.path.lexists(file):
            raise UserError(f"--out {out}: {file} exists, and nothing is overwritten. Give another name, or remove it")
    try:
        check_writable(path.parent)
    except UserError as error:
        raise UserError(f"--out {out}: {error}") from error
    return plan


def _split_of(split: str) -> Split:
    if split not in ("train", "validation"):
        raise UserError(f"--split {split}: it must be train or validation")
    return cast("Split", split)


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
    trust_run: bool = False,
) -> EvaluationPlan:
    """Build the plan from the arguments and options of the command line. Invalid ones raise `UserError`.

    The name of a directory among `words` is a model; `a.b=value` and `~a.b` are overrides.
    """
    overrides = [word for word in words if _OVERRIDE.fullmatch(word) and not os.path.isdir(word)]
    names = [word for word in words if word not in overrides]
    if not names:
        raise UserError("no model given; give the output_dir of a run, or a Hugging Face model directory or name")
    if len(set(names)) < len(names):
        raise UserError(f"{', '.join(names)}: a model is given more than once; give different ones to compare")
    chosen_split = _split_of(split)
    try:
        ks = [int(word) for word in k.split(",") if word.strip()]
    except ValueError as error:
        raise UserError(f"--k {k}: give numbers of attempts separated by commas, such as 1,4,8") from error
    models = [find_model(name) for name in names]
    if temperature is not None:
        overrides.append(f"generation.temperature={temperature}")
    configs = configurations(models, overrides, config=config, trust_run=trust_run)
    sampled = any(override.startswith("generation.temperature=") for override in overrides)
    chosen = choose_attempts(configs[0].generation.temperature, attempts, ks, sampled)
    folder = Path("evaluations") if len(models) > 1 or models[0].run is None else models[0].run / "evaluations"
    folder = Path(out) if out is not None else folder / datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    check_new_folder(folder, f"--out {folder}")
    return EvaluationPlan(models, configs, folder, chosen_split, samples, *chosen)


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the arguments of `rlframework generate` into overrides, by the first name of their key, and prompts."""
    from rlframework.config.sections import RunConfig

    names = RunConfig.model_fields
    overrides = [
        word for word in words if _OVERRIDE.fullmatch(word) and re.split(r"[.=]", word.lstrip("~"))[0] in names
    ]
    return overrides, [word for word in words if word not in overrides]


def choose_attempts(
    temperature: float, attempts: int | None, ks: Sequence[int], sampled: bool
) -> tuple[int, tuple[int, ...], bool]:
    """The attempts per prompt, the `ks` of pass@k, and whether decoding is greedy; `ConfigError` if they contradict.

    `attempts` defaults to the largest of `ks`. A single attempt is greedy unless `sampled` is true; several are sampled
    at `temperature`. `ks` defaults to the powers of two below `attempts`, and `attempts` itself.
    """
    attempts = attempts or max(ks, default=1)
    if wrong := [k for k in ks if not 1 <= k <= attempts]:
        raise ConfigError(f"--k {wrong[0]}: with {attempts} attempts, k must be from 1 to {attempts}; raise --attempts")
    if attempts > 1 and temperature == 0.0:
        raise ConfigError(
            f"--attempts {attempts}: all attempts at temperature 0 are the same; give --temperature, such as 1"
        )
    if not ks and attempts > 1:
        ks = default_ks(attempts)
    return attempts, tuple(sorted(set(ks))), attempts == 1 and (not sampled or temperature == 0.0)
