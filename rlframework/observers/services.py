"""What the observers of services (W&B, MLflow) share: the check before a run, names, and what is sent about a run."""

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
"""Key of the `observers` section, which is the extra's name too, to the module that must be there."""

COLUMNS = ("step", "kind", "prompt", "completion", "reward")
"""Columns of a table of samples."""


def check_services(config: ObserversConfig) -> None:
    """`ConfigError` where a service is asked for whose package is missing, or whose address holds a password."""
    for name, module in SERVICES.items():
        if getattr(config, name) and not _installed(module):
            raise ConfigError(
                f"observers.{name} is given, but the package {module!r} is not installed. Install it with "
                f"pip install 'rlframework-core[{name}]', or set observers.{name}=false"
            )
    uri = config.mlflow.tracking_uri if config.mlflow else None
    if uri and hide_in_text(uri) != uri:
        raise ConfigError(
            "observers.mlflow.tracking_uri holds a user or password, and the configuration is written down with the "
            "run. Take them out of the address and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )


def run_name(run: RunInfo, given: str | None) -> str:
    """The name that a service shows."""
    return given or run.output_dir.absolute().name


def facts(run: RunInfo) -> dict[str, Any]:
    """Configuration and environment of `run` for a service, without secrets."""
    values = dict(hide_secrets(dump_config(run.config)))
    return values | {"environment_of_run": hide_secrets(read_environment(run.output_dir))}


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """The values by dotted names; what is no section is a value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return found


def rows_of(samples: Sequence[SampleRecord]) -> list[list[Any]]:
    """The samples as rows of `COLUMNS`."""
    return [[asdict(sample)[column] for column in COLUMNS] for sample in samples]


def _installed(module: str) -> bool:
    spec = PathFinder.find_spec(module)
    return spec is not None and spec.origin is not None  # a folder `wandb` that a run left is no package
