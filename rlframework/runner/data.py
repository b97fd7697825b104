"""The data of a run: rows that Python code gives to it, and the steps of its epochs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rlframework.base.errors import ConfigError
from rlframework.config.environments import RowsConfig
from rlframework.config.problems import raise_problems
from rlframework.config.sections import RunConfig
from rlframework.config.validate import check_run

if TYPE_CHECKING:
    from rlframework.algorithms.algorithm import Algorithm
    from rlframework.datasets.sources.memory import Data
    from rlframework.interfaces.environment import Environment

_LOG = logging.getLogger(__name__)


def with_data(config: RunConfig, data: Data) -> RunConfig:
    """Return `config` with the training rows `data`; they replace those of `environment.path`.

    `data`: rows (a list of dictionaries, or a `datasets.Dataset`), or `{"train": rows, "validation": rows}`. Every row
    is read once, for a digest that the run's `config.yaml` keeps. Raises a `ConfigError` if `config` names other data,
    or has the digest of other rows, and a `DataError` for what cannot be rows.
    """
    from rlframework.datasets.sources.memory import given_rows  # imports numpy

    section = config.environment
    if not isinstance(section, RowsConfig):
        raise ConfigError(
            f"environment.name={section.name} does not take rows from Python; set environment.name=dataset, or do not "
            "give `data`"
        )
    if named := section.named_data:
        raise ConfigError(f"environment.{named} names the training data, and `data` was given too; remove one of them")
    rows = given_rows(data)
    if rows.validation is not None and section.validation_path is not None:
        raise ConfigError("environment.validation_path is set, and `data` has validation rows too; remove one of them")
    digest = rows.digest()
    if section.data_digest not in (None, digest):
        raise ConfigError(
            f"the run was started with other rows: their digest is {section.data_digest}, that of the "
            f"{len(rows.train):,} training rows given now is {digest}. To resume the run, give the same rows in the "
            "same order; to train on other rows, start a new run, with environment.data_digest=null"
        )
    return config.model_copy(update={"environment": section.with_given(rows, digest)})


def require_data(config: RunConfig) -> None:
    """Raise `ConfigError` if the environment trains on rows and there are none."""
    section = config.environment
    if not isinstance(section, RowsConfig) or section.given is not None:
        return
    if section.data_digest is not None:
        raise ConfigError(
            f"the rows of this run came from Python code and are not stored (digest {section.data_digest}). Resume it "
            "with rlframework.resume(output_dir, data=rows) and the same rows; elsewhere, set environment.path to a "
            "file of rows and environment.data_digest to null"
        )
    if section.named_data is None:
        raise ConfigError(
            "environment.path: required key is missing (file, directory, glob pattern, or name of a dataset on the "
            "Hugging Face Hub). Set it, or give rows from Python: rlframework.run(config, "
            "data=rows)"
        )


def with_steps(config: RunConfig, algorithm: type[Algorithm], environment: Environment) -> RunConfig:
    """Return `config` with `num_steps` in place of `num_epochs`, counted with the samples of `environment`.

    Every sample is trained on at least `num_epochs` times: the number of steps is rounded up. Raises a `ConfigError` if
    another key names a step after the last one.
    """
    section = config.algorithm
    if section.num_epochs is None:
        return config
    samples, per_step = algorithm.training_samples(config, environment), algorithm.samples_per_step(config)
    steps = -(-samples * section.num_epochs // per_step)
    skipped = ", whatever algorithm.curriculum skips" if getattr(section, "curriculum", None) else ""
    text = "%d epoch(s) of %d training samples, %d a step: %d step(s)%s"
    _LOG.info(text, section.num_epochs, samples, per_step, steps, skipped)
    counted = section.model_copy(update={"num_steps": steps, "num_epochs": None})
    config = config.model_copy(update={"algorithm": counted})
    raise_problems(list(check_run(config)))
    return config
