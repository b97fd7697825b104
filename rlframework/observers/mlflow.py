"""A run in MLflow, behind the extra `mlflow`. The package is imported when a run starts.

Only the client is used, so that MLflow's active run, if the program has one, stays as it is. Left out: uploading models
(only their paths are told).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.observers.environment import run_id
from rlframework.observers.services import COLUMNS, facts, flat, rows_of, run_name
from rlframework.plugins.hookspec import RunInfo, hookimpl

if TYPE_CHECKING:
    from rlframework.config.observers import MlflowConfig
    from rlframework.plugins.hookspec import SampleRecord

TAG = "rlframework.run_id"
"""The tag by which a run that goes on finds itself."""

BATCH = 100
"""Parameters in one call: MLflow's limit."""

LONGEST_VALUE = 500
"""Characters of a parameter's value: what every MLflow server takes."""


class MlflowObserver:
    """Metrics by step under their own names, samples as tables, checkpoint paths as tags, and the final state."""

    def __init__(self) -> None:
        self._client: Any = None
        self._id = ""

    @hookimpl
    def rlframework_run_started(self, run: RunInfo) -> None:
        """Begin the run, or go on with it where the experiment has one of `output_dir`."""
        from mlflow import MlflowClient

        section = run.config.observers.mlflow
        assert section
        self._client = MlflowClient(section.tracking_uri)
        experiment = self._experiment(section.experiment)
        own = run_id(run.output_dir)
        known = self._client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{own}'", max_results=1)
        self._id = known[0].info.run_id if known else self._create(run, section, experiment, own)
        self._client.update_run(self._id, status="RUNNING")
        print(f"MLflow: run {self._id} in {section.experiment!r}", file=sys.stderr, flush=True)

    @hookimpl
    def rlframework_step_finished(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRecord]
    ) -> None:
        """Send the step; the samples are an artifact `samples/step-...json` of MLflow's form of a table."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in metrics.items()])
        if samples:
            table = {"columns": list(COLUMNS), "data": rows_of(samples)}
            self._client.log_dict(self._id, table, f"samples/step-{step:06d}.json")

    @hookimpl
    def rlframework_checkpoint_saved(self, step: int, path: Path) -> None:
        """Tell where the last checkpoint lies."""
        self._client.set_tag(self._id, "checkpoint.step", str(step))
        self._client.set_tag(self._id, "checkpoint.path", str(path))

    def ended(self, state: str) -> None:
        """End the run as `state`: finished, failed or killed."""
        if self._id:
            self._client.set_terminated(self._id, state.upper())

    def close(self) -> None:
        """The client holds nothing."""

    def _experiment(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        return str(known.experiment_id if known else self._client.create_experiment(name))

    def _create(self, run: RunInfo, section: MlflowConfig, experiment: str, own: str) -> str:
        from mlflow.entities import Param

        tags = {**section.tags, TAG: own}
        created = self._client.create_run(experiment, tags=tags, run_name=run_name(run, section.run_name))
        told = facts(run)
        environment = told.pop("environment_of_run")
        parameters = [Param(name, str(value)[:LONGEST_VALUE]) for name, value in flat(told).items()]
        for some in _parts(parameters):
            self._client.log_batch(created.info.run_id, params=some)
        self._client.log_dict(created.info.run_id, told, "config.json")
        self._client.log_dict(created.info.run_id, environment, "environment.json")
        return str(created.info.run_id)


def _parts(items: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]
