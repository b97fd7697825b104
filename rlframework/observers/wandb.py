"""Logs a run to Weights & Biases (extra `wandb`). The package is imported when a run starts.

W&B finds the API key itself (`wandb login`, WANDB_API_KEY); this module does not read it. Does not upload models; only
their paths are logged. W&B's own record of the command line, user and host is disabled, because it may contain what
`rlframework.observers.secrets` hides.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.observers.environment import run_id
from rlframework.observers.services import COLUMNS, rows_of, run_metadata, run_name
from rlframework.plugins.hookspec import RunInfo, hookimpl

if TYPE_CHECKING:
    from rlframework.plugins.hookspec import SampleRecord

_LOG = logging.getLogger(__name__)


class WandbObserver:
    """Logs metrics by step under their own names, a table `samples`, checkpoint paths and the final state."""

    def __init__(self) -> None:
        self._run: Any = None
        self._wandb: Any = None

    @hookimpl
    def rlframework_run_started(self, run: RunInfo) -> None:
        """Create the W&B run, or resume the one that was created for `output_dir`."""
        import wandb

        section = run.config.observers.wandb
        assert section
        self._wandb = wandb
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=run_name(run, section.run_name),
            tags=list(section.tags),
            mode=section.mode,
            dir=str(run.output_dir),
            id=run_id(run.output_dir),
            resume="allow" if section.mode == "online" else None,
            config=run_metadata(run),
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
        values: dict[str, Any] = {"step": step, **metrics}
        if samples:
            values["samples"] = self._wandb.Table(columns=list(COLUMNS), data=rows_of(samples))
        self._run.log(values)

    @hookimpl
    def rlframework_checkpoint_saved(self, step: int, path: Path) -> None:
        """Log the path of the last checkpoint."""
        self._run.summary.update({"checkpoint/step": step, "checkpoint/path": str(path)})

    def ended(self, state: str) -> None:
        """End the run as `state`: finished, failed or killed."""
        if self._run is not None:
            self._run.summary["state"] = state
            self._run.finish(exit_code=0 if state == "finished" else 1)
            self._run = None

    def close(self) -> None:
        """Do nothing: `ended` has closed the run."""
