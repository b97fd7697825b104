"""Observers that report to TensorBoard, and to services: Weights & Biases, MLflow and Trackio, each with an extra.

The packages are imported when they are used, and find their credentials themselves. Models are not uploaded; only their
paths are logged.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from contextvars import Context
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rlframework.base.files import AppendedFile
from rlframework.base.logs import plugin_logger
from rlframework.base.secrets import hide_in_text, hide_secrets
from rlframework.config.sections import MlflowConfig, ObserversConfig
from rlframework.observers.run_environment import flatten, read_environment, run_id
from rlframework.plugins.configure import dump_config
from rlframework.plugins.hookspec import RunInfo, SampleRecord, hookimpl

_LOG = plugin_logger(__name__)

SERVICES = ("wandb", "mlflow", "trackio")
"""Keys in the `observers` section, which are also the names of the extra and of the package."""

COLUMNS = ("step", "kind", "prompt", "completion", "reward")
"""Columns of a sample table."""

MLFLOW_TAG = "rlframework.run_id"
"""The tag by which a resumed run finds its MLflow run."""

MLFLOW_VALUE_LENGTH = 500
"""Maximum length of a parameter's value that every MLflow server accepts."""

TRACKIO_ID_LENGTH = 8
"""Characters of the run's id in the name of a Trackio run."""


def problems_of_services(config: ObserversConfig) -> list[str]:
    """Return a message for each enabled service whose package is missing or whose address contains a password."""
    problems = [
        f"observers.{name} is set, but the package {name!r} is not installed: run pip install "
        f"'rlframework-core[{name}]', or set observers.{name}=false"
        for name in SERVICES
        if getattr(config, name) and not _installed(name)
    ]
    uri = config.mlflow.tracking_uri if config.mlflow else None
    if uri and hide_in_text(uri) != uri:
        problems.append(
            "observers.mlflow.tracking_uri contains a user or password, but the configuration is stored with the run: "
            "remove them from the address and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    return problems


class TensorBoardObserver:
    """Writes each metric as a scalar under its own name, to `tensorboard/` in the run's directory.

    A resumed run repeats some steps; TensorBoard discards their earlier values.
    """

    _folder: Path
    _file: AppendedFile | None = None

    @hookimpl
    def rlframework_run_started(self, run: RunInfo) -> None:
        """Take the folder to write to."""
        self._folder = run.output_dir / "tensorboard"

    @hookimpl
    def rlframework_step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the step's scalars. The first step imports TensorBoard, which takes seconds."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        events = []
        if self._file is None:
            resumed = self._folder.is_dir() and any(self._folder.iterdir())
            place = f"{socket.gethostname()}.{os.getpid()}"
            self._file = AppendedFile(self._folder / f"events.out.tfevents.{time.time_ns() // 1000}.{place}")
            events.append(Event(file_version="brain.Event:2"))
            if resumed:
                events.append(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        events.append(Event(step=step, summary=Summary(value=values)))
        records = io.BytesIO()
        for event in events:
            event.wall_time = time.time()
            RecordWriter(records).write(event.SerializeToString())
        self._file.write(records.getvalue())

    def close(self, state: str = "finished") -> None:
        """Close the event file."""
        if self._file is not None:
            self._file.close()


class WandbObserver:
    """Logs metrics by step under their own names, a table `samples`, checkpoint paths and the final state.

    W&B's own record of the command line, user and host is disabled, because it may contain what
    `rlframework.base.secrets` hides.
    """

    _run: Any = None

    @hookimpl
    def rlframework_run_started(self, run: RunInfo) -> None:
        """Create the W&B run, or resume the one that was created for `output_dir`."""
        import wandb

        section = run.config.observers.wandb
        assert section
        config, environment = description(run)
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=section.run_name or run.output_dir.absolute().name,
            tags=list(section.tags),
            mode=section.mode,
            dir=str(run.output_dir),
            id=run_id(run.output_dir),
            resume="allow" if section.mode == "online" else None,
            config={**config, "environment_of_run": environment},
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, save_code=False, x_disable_meta=True
            ),
        )
        # a resumed run repeats some steps, but W&B's own step counter cannot decrease
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        _LOG.info("W&B: %s", self._run.dir if section.mode == "offline" else self._run.url)

    @hookimpl
    def rlframework_step_finished(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRecord]
    ) -> None:
        """Log the step."""
        import wandb

        table = {"samples": wandb.Table(**sample_table(samples))} if samples else {}
        self._run.log({"step": step, **metrics, **table})

    @hookimpl
    def rlframework_checkpoint_saved(self, step: int, path: Path) -> None:
        """Log the path of the last checkpoint."""
        self._run.summary.update({"checkpoint/step": step, "checkpoint/path": str(path)})

    def close(self, state: str) -> None:
        """End the run as `state`: finished, failed or killed."""
        if self._run is not None:
            self._run.summary["state"] = state
            self._run.finish(exit_code=0 if state == "finished" else 1)


class MlflowObserver:
    """Logs metrics by step under their own names, samples as tables, checkpoint paths as tags, and the final state.

    Uses only MLflow's client, so that the program's own active run, if any, is not affected.
    """

    _client: Any
    _id = ""

    @hookimpl
    def rlframework_run_started(self, run: RunInfo) -> None:
        """Create the MLflow run, or resume it if the experiment has a run for `output_dir`."""
        from mlflow import MlflowClient

        section = run.config.observers.mlflow
        assert section
        self._client = MlflowClient(section.tracking_uri)
        found = self._client.get_experiment_by_name(section.experiment)
        experiment = str(found.experiment_id if found else self._client.create_experiment(section.experiment))
        query = f"tags.`{MLFLOW_TAG}` = '{run_id(run.output_dir)}'"
        known = self._client.search_runs([experiment], filter_string=query, max_results=1)
        self._id = known[0].info.run_id if known else self._create(run, section, experiment)
        self._client.update_run(self._id, status="RUNNING")
        _LOG.info("MLflow: run %s in %r", self._id, section.experiment)

    def _create(self, run: RunInfo, section: MlflowConfig, experiment: str) -> str:
        from mlflow.entities import Param

        tags, name = {**section.tags, MLFLOW_TAG: run_id(run.output_dir)}, run.output_dir.absolute().name
        created = self._client.create_run(experiment, tags=tags, run_name=section.run_name or name).info.run_id
        config, environment = description(run)
        params = [Param(name, str(value)[:MLFLOW_VALUE_LENGTH]) for name, value in flatten(config).items()]
        self._client.log_batch(created, params=params)
        self._client.log_dict(created, config, "config.json")
        self._client.log_dict(created, environment, "environment.json")
        return str(created)

    @hookimpl
    def rlframework_step_finished(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRecord]
    ) -> None:
        """Log the step. Its samples become an artifact `samples/step-...json` in MLflow's table format."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = {re.sub(r"[^\w.\- :/]", "_", name): value for name, value in metrics.items()}  # no @, as of pass@4
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in named.items()])
        if samples:
            self._client.log_dict(self._id, sample_table(samples), f"samples/step-{step:06d}.json")

    @hookimpl
    def rlframework_checkpoint_saved(self, step: int, path: Path) -> None:
        """Log the path of the last checkpoint."""
        self._client.set_tag(self._id, "checkpoint.step", str(step))
        self._client.set_tag(self._id, "checkpoint.path", str(path))

    def close(self, state: str) -> None:
        """End the run as `state`: finished, failed or killed."""
        if self._id:
            self._client.set_terminated(self._id, state.upper())


def description(run: RunInfo) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the run's configuration and environment without secrets."""
    return hide_secrets(dump_config(run.config)), hide_secrets(read_environment(run.output_dir))


def sample_table(samples: Sequence[SampleRecord]) -> dict[str, Any]:
    """Return the columns and rows of `samples`, for a service's table."""
    return {"columns": list(COLUMNS), "data": [[getattr(sample, name) for name in COLUMNS] for sample in samples]}


def _installed(module: str) -> bool:
    spec = PathFinder.find_spec(module)
    return spec is not None and spec.origin is not None  # a folder `wandb` left by a run is not a package


class TrackioObserver:
    """Logs metrics by step under their own names, a table `samples`, checkpoint paths and the final state.

    Trackio finds the run to resume by its name, so the name ends with the beginning of the run's id: another run in a
    folder of the same name is another run there too. What Trackio prints is logged at the level DEBUG. A resumed run
    repeats some steps, whose earlier values Trackio keeps.
    """

    _run: Any = None
    _step = 0

    @hookimpl
    def rlframework_run_started(self, run: RunInfo) -> None:
        """Create the run, or resume the one that was created for `output_dir`.

        `init` would finish the run that is active in its context, which may be the program's own: so it gets an empty
        context.
        """
        import trackio

        section = run.config.observers.trackio
        assert section
        config, environment = description(run)
        name = section.run_name or run.output_dir.absolute().name
        with redirect_stdout(io.StringIO()) as printed:
            self._run = Context().run(
                trackio.init,
                project=section.project,
                name=f"{name}-{run_id(run.output_dir)[:TRACKIO_ID_LENGTH]}",
                space_id=section.space_id,
                private=section.private,
                config={**config, "environment_of_run": environment},
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        _LOG.debug("%s", printed.getvalue())
        shown = self._run.url or f"trackio show --project {shlex.quote(section.project)}"  # the Space, or the server
        _LOG.info("Trackio: run %s in %r: %s", self._run.name, section.project, shown)

    @hookimpl
    def rlframework_step_finished(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRecord]
    ) -> None:
        """Log the step."""
        import trackio

        self._step = step
        table = {"samples": trackio.Table(**sample_table(samples))} if samples else {}
        self._run.log({**metrics, **table}, step=step)

    @hookimpl
    def rlframework_checkpoint_saved(self, step: int, path: Path) -> None:
        """Log the path of the checkpoint."""
        self._run.log({"checkpoint/path": str(path)}, step=step)

    def close(self, state: str) -> None:
        """End the run as `state`: finished, failed or killed."""
        if self._run is not None:
            self._run.log({"state": state}, step=self._step)
            with redirect_stdout(io.StringIO()) as printed:
                self._run.finish()
            _LOG.debug("%s", printed.getvalue())
