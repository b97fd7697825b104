"""Observer that reports to Trackio (extra `trackio`), which keeps runs on this machine or in a Hugging Face Space."""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from contextvars import Context
from pathlib import Path
from typing import Any

from rlframework.base.logs import plugin_logger
from rlframework.observers.run_environment import run_id
from rlframework.plugins.hookspec import RunInfo, SampleRecord, hookimpl
from rlframework_report.services import description, sample_table

_LOG = plugin_logger(__name__)

_ID_LENGTH = 8


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
                name=f"{name}-{run_id(run.output_dir)[:_ID_LENGTH]}",
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
