"""Turn the arguments of `rlframework evaluate` and `generate` into configurations.

RUN_OR_MODEL is a run's `output_dir`, with its `config.yaml` and trained model, or a Hugging Face model. Models that are
compared share environment, generation settings and seed.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlframework.algorithms.intervals import default_ks
from rlframework.base.errors import ConfigError, UserError
from rlframework.base.files import check_new_folder, check_writable
from rlframework.config.load import compose, escape_interpolation
from rlframework.huggingface.hub import is_path, require_available
from rlframework.plugins.configure import load_config
from rlframework.policy.checkpoint.saved import has_adapters, is_sharded, reject_native

if TYPE_CHECKING:
    from rlframework.config.sections import RunConfig
    from rlframework.interfaces.environment import Split

_LOG = logging.getLogger(__name__)

ALONE: Mapping[str, Any] = {
    "generation": {"max_new_tokens": 256},
    "observers": {"console": False, "jsonl": False, "tensorboard": False, "curve": False, "samples": 0},
}
"""Changes to the default configuration for a model that belongs to no run."""

_OVERRIDE = re.compile(r"~[\w-]+(\.[\w-]+)*(=.*)?|[\w-]+(\.[\w-]+)*=.*", re.DOTALL)


@dataclass(frozen=True)
class ModelSource:
    """A model to evaluate or generate with. `run`: the directory of the run that trained it; None if there is none."""

    name: str
    model: str
    run: Path | None


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


def generation_config(
    name: str,
    *,
    overrides: Sequence[str] = (),
    config: str | None = None,
    samples: int = 1,
    best_of: int | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    greedy: bool = False,
    seed: int | None = None,
    trust_run: bool = False,
) -> RunConfig:
    """The configuration of `rlframework generate NAME`. Options that contradict each other raise `UserError`.

    Without `best_of`, the environment is not used, and none need be given.
    """
    if greedy and temperature:
        raise UserError(f"--greedy and --temperature {temperature} contradict each other; give one of them")
    temperature = 0.0 if greedy else temperature
    given = {"generation.temperature": temperature, "generation.max_new_tokens": max_new_tokens, "seed": seed}
    changes = [*overrides, *(f"{key}={value}" for key, value in given.items() if value is not None)]
    alone = ALONE if best_of else {**ALONE, "environment": {"name": "addition"}}  # no data is read
    loaded = configurations([find_model(name)], changes, config=config, alone=alone, trust_run=trust_run)[0]
    each, option = (best_of, "--best-of") if best_of else (samples, "--samples")
    if each > 1 and loaded.generation.temperature == 0.0:
        raise UserError(
            f"{option} {each}: all greedy completions of a prompt are the same; give --temperature, such as 1"
        )
    return loaded


def find_model(name: str) -> ModelSource:
    """Find the run, checkpoint or model called `name`. A directory that is none of them raises `UserError`."""
    path = Path(name)
    for folder in (path, path / "model"):
        reject_native(folder)
        if is_sharded(folder):
            raise UserError(
                f"{folder} holds a sharded checkpoint, which is not a model directory; convert it first: "
                f"rlframework convert {name} NEW_FOLDER --to huggingface"
            )
        if has_adapters(folder):
            raise UserError(
                f"{folder} holds LoRA adapters without their base model; give the run itself, which saves the merged "
                f"model at its end, or merge them: rlframework convert {name} NEW_FOLDER --to huggingface"
            )
    if (path / "config.json").is_file():
        return ModelSource(name, name, None)
    is_run, has_model = (path / "config.yaml").is_file(), (path / "model" / "config.json").is_file()
    if has_model:
        run = path if is_run else path.absolute().parent.parent  # of RUN/checkpoints/step-NNNNNN
        return ModelSource(name, str(path / "model"), run if (run / "config.yaml").is_file() else None)
    if is_run:
        from rlframework.algorithms.checkpoints import newest_checkpoint  # imports torch

        newest = newest_checkpoint(path)
        instead = "give the directory of a model" if newest is None else f"take its newest checkpoint ({newest})"
        raise UserError(
            f"{path} holds a run without a trained model, so it has not finished. Wait for it, or {instead}"
        )
    if path.is_dir():
        raise UserError(
            f"{name} is neither a run (it has no config.yaml) nor a model (it has no config.json); give the output_dir "
            "of a run, or a Hugging Face model directory or name"
        )
    if is_path(name) or path.exists():
        raise UserError(f"there is no directory {name}; give the output_dir of a run, or a model directory or name")
    require_available(name, "RUN_OR_MODEL")
    return ModelSource(name, name, None)


def configurations(
    models: Sequence[ModelSource],
    overrides: Sequence[str] = (),
    *,
    config: str | None = None,
    alone: Mapping[str, Any] = ALONE,
    trust_run: bool = False,
) -> list[RunConfig]:
    """The validated configuration of each model.

    All derive from `config` (a YAML file) if given, else from the first model that belongs to a run, else from `alone`.
    Each uses the model's own tokenizer and chat template. `overrides` come last. Raises `ConfigError` if a run's
    configuration asks for what only a run that is trusted may (`config.trust`); `trust_run` says that it is.
    """
    if any(re.match(r"~?policy\.model_name\b", override) for override in overrides):
        raise ConfigError("policy.model_name cannot be overridden: the model is RUN_OR_MODEL")
    runs = [model.run for model in models if model.run is not None]
    source: str | Path | Mapping[str, Any] = config or (runs[0] / "config.yaml" if runs else alone)
    if config is None and len(runs) > 1:
        _LOG.info(
            "all models use the environment, generation settings and seed of %s; --config FILE uses others", runs[0]
        )
    run = runs[0] if config is None and runs and not trust_run else None
    loaded = []
    for model in models:
        name = f"policy.model_name={json.dumps(escape_interpolation(model.model))}"
        own = [name, "policy.tokenizer_name=null", "policy.chat_template=null", *overrides]
        tree = compose(source, own)
        values = tree.values
        # errors in sections of training must not prevent generation; LoRA's adapters are already merged
        policy = values.get("policy")
        for section, key in ((values, "recording"), (values, "profiler"), (policy, "scheduler"), (policy, "lora")):
            if isinstance(section, dict):
                section.pop(key, None)
        tree = replace(tree, values={**values, "algorithm": {"name": "sft"}})
        loaded.append(load_config(tree, run=run))
    return loaded
