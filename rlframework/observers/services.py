"""Common code of the observers for services (W&B, MLflow): the check before a run, names, and a run's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from rlframework.configure import dump_config
from rlframework.errors import ConfigError
from rlframework.observers.environment import read_environment
from rlframework.observers.secrets import hide_in_text, hide_secrets

if TYPE_CHECKING:
    from rlframework.config.sections import ObserversConfig
    from rlframework.plugins.hookspec import RunInfo, SampleRecord

SERVICES = {"wandb": "wandb", "mlflow": "mlflow"}
"""Maps the key in the `observers` section, which is also the extra's name, to the required module."""

COLUMNS = ("step", "kind", "prompt", "completion", "reward")
"""Columns of a sample table."""


def check_services(config: ObserversConfig) -> None:
    """Raise a `ConfigError` if an enabled service's package is missing, or if its address contains a password."""
    for name, module in SERVICES.items():
        if getattr(config, name) and not _installed(module):
            raise ConfigError(
                f"observers.{name} is set, but the package {module!r} is not installed: run pip install "
                f"'rlframework-core[{name}]', or set observers.{name}=false"
            )
    uri = config.mlflow.tracking_uri if config.mlflow else None
    if uri and hide_in_text(uri) != uri:
        raise ConfigError(
            "observers.mlflow.tracking_uri contains a user or password, but the configuration is stored with the run: "
            "remove them from the address and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )


def run_name(run: RunInfo, given: str | None) -> str:
    """The run's display name: `given`, or the name of its output directory."""
    return given or run.output_dir.absolute().name


def run_metadata(run: RunInfo) -> dict[str, Any]:
    """The configuration of `run`, and its environment as `environment_of_run`, without secrets."""
    values = dict(hide_secrets(dump_config(run.config)))
    return values | {"environment_of_run": hide_secrets(read_environment(run.output_dir))}


def flatten(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flatten(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return found


def rows_of(samples: Sequence[SampleRecord]) -> list[list[Any]]:
    """The samples as rows of `COLUMNS`."""
    return [[asdict(sample)[column] for column in COLUMNS] for sample in samples]


def _installed(module: str) -> bool:
    spec = PathFinder.find_spec(module)
    return spec is not None and spec.origin is not None  # a folder `wandb` left by a run is not a package
