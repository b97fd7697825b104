"""Models that commands take by name: a run's `output_dir` with its trained model, or a Hugging Face model.

Models that are compared share environment, generation settings and seed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import ConfigError, UserError
from rlframework.config.load import compose, escape_interpolation
from rlframework.huggingface.hub import is_path, require_available
from rlframework.plugins.configure import load_config
from rlframework.policy.checkpoint.saved import has_adapters, is_sharded, reject_native

if TYPE_CHECKING:
    from rlframework.config.sections import RunConfig

_LOG = logging.getLogger(__name__)

ALONE: Mapping[str, Any] = {
    "generation": {"max_new_tokens": 256},
    "observers": {"console": False, "jsonl": False, "tensorboard": False, "curve": False, "samples": 0},
}
"""Changes to the default configuration for a model that belongs to no run."""


@dataclass(frozen=True)
class ModelSource:
    """A model to evaluate or generate with. `run`: the directory of the run that trained it; None if there is none."""

    name: str
    model: str
    run: Path | None


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
