"""Open the training rows that a configuration names or Python code gave, and the rows given for validation."""

from __future__ import annotations

from rlframework.base.errors import DataError
from rlframework.config.environments import RowsConfig
from rlframework.datasets.sources.opening import is_local, open_rows
from rlframework.datasets.sources.rows import Rows


def open_splits(
    config: RowsConfig, *, subset: str | None, split: str | None, validation: str | None, train: Rows | None = None
) -> tuple[Rows, Rows | None]:
    """Return the rows to train on, and those given for validation, or None to hold out part of the first.

    `validation`: the split of `config.path` to validate on, without a `validation_path`. `train`: the training rows, if
    they are open already. Raises a `DataError` if they are neither named nor given.
    """
    given = config.given
    if train is None and given is not None:
        train = given.train
    elif train is None and config.path is not None:
        train = open_rows(config.path, subset=subset, split=split, key="environment.path")
    elif train is None:
        raise DataError("environment.path is not set, and no rows were given; set it, or give rows from Python")
    path = config.validation_path or config.path
    if path is None or (config.validation_path is None and validation is None):
        return train, None if given is None else given.validation
    subset = subset if config.validation_path is None or not is_local(path) else None
    key = "environment.path" if config.validation_path is None else "environment.validation_path"
    return train, open_rows(path, subset=subset, split=validation, key=key)
