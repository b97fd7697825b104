"""Logs a run to MLflow (extra `mlflow`). The package is imported when a run starts.

Uses only MLflow's client, so that the program's own active run, if any, is not affected. Does not upload models; only
their paths are logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.observers.environment import run_id
from rlframework.observers.services import COLUMNS, flatten, rows_of, run_metadata, run_name
from rlframework.plugins.hookspec import RunInfo, hookimpl

if TYPE_CHECKING:
    from rlframework.config.observers import MlflowConfig
    from rlframework.plugins.hookspec import SampleRecord

_LOG = logging.getLogger(__name__)

TAG = "rlframework.run_id"
"""The tag by which a resumed run finds its MLflow run."""

BATCH = 100
"""Maximum number of parameters in one call, MLflow's limit."""

MAX_VALUE_LENGTH = 500
"""Maximum length of a parameter's value that every MLflow server accepts."""


class MlflowObserver:
    """Logs metrics by step under their own names, samples as tables, checkpoint paths as tags, and the final state."""

    def __init__(self) -> None:
        self._client: Any = None
        self._id = ""

    @hookimpl
    def rlframework_run_started(self, run: RunInfo) -> None:
        """Create the MLflow run, or resume it if the experiment has a run for `output_dir`."""
        from mlflow import MlflowClient

        section = run.config.observers.mlflow
        assert section
        self._client = MlflowClient(section.tracking_uri)
        experiment = self._experiment(section.experiment)
        tag = run_id(run.output_dir)
        known = self._client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{tag}'", max_results=1)
        self._id = known[0].info.run_id if known else self._create(run, section, experiment, tag)
        self._client.update_run(self._id, status="RUNNING")
        _LOG.info("MLflow: run %s in %r", self._id, section.experiment)

    @hookimpl
    def rlframework_step_finished(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRecord]
    ) -> None:
        """Log the step. Its samples become an artifact `samples/step-...json` in MLflow's table format."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in metrics.items()])
        if samples:
            table = {"columns": list(COLUMNS), "data": rows_of(samples)}
            self._client.log_dict(self._id, table, f"samples/step-{step:06d}.json")

    @hookimpl
    def rlframework_checkpoint_saved(self, step: int, path: Path) -> None:
        """Log the path of the last checkpoint."""
        self._client.set_tag(self._id, "checkpoint.step", str(step))
        self._client.set_tag(self._id, "checkpoint.path", str(path))

    def ended(self, state: str) -> None:
        """End the run as `state`: finished, failed or killed."""
        if self._id:
            self._client.set_terminated(self._id, state.upper())

    def close(self) -> None:
        """Do nothing: the client has nothing to close."""

    def _experiment(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        return str(known.experiment_id if known else self._client.create_experiment(name))

    def _create(self, run: RunInfo, section: MlflowConfig, experiment: str, tag: str) -> str:
        from mlflow.entities import Param

        tags = {**section.tags, TAG: tag}
        created = self._client.create_run(experiment, tags=tags, run_name=run_name(run, section.run_name))
        config = run_metadata(run)
        environment = config.pop("environment_of_run")
        parameters = [Param(name, str(value)[:MAX_VALUE_LENGTH]) for name, value in flatten(config).items()]
        for batch in _batches(parameters):
            self._client.log_batch(created.info.run_id, params=batch)
        self._client.log_dict(created.info.run_id, config, "config.json")
        self._client.log_dict(created.info.run_id, environment, "environment.json")
        return str(created.info.run_id)


def _batches(items: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]
