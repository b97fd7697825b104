"""Writes metrics for TensorBoard to `tensorboard/` in the run's directory.

A resumed run repeats some steps; TensorBoard discards their earlier values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlframework.plugins.hookspec import RunInfo, hookimpl


class TensorBoardObserver:
    """Writes each metric as a scalar under its own name."""

    def __init__(self) -> None:
        self._writer: Any = None
        self._make_writer: Any = None

    @hookimpl
    def rlframework_run_started(self, run: RunInfo) -> None:
        """Open the folder. Imports TensorBoard, which takes seconds."""
        from torch.utils.tensorboard import SummaryWriter

        folder = run.output_dir / "tensorboard"
        resumed = folder.is_dir() and any(folder.iterdir())
        self._make_writer = lambda step: SummaryWriter(log_dir=str(folder), purge_step=step if resumed else None)
        if not resumed:
            self._writer = self._make_writer(0)

    @hookimpl
    def rlframework_step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the step's scalars."""
        if self._writer is None:
            self._writer = self._make_writer(step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
