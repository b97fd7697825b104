"""Metrics for TensorBoard, under `tensorboard/` in the run's directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlframework.plugins.hookspec import RunInfo, hookimpl


class TensorBoardObserver:
    """Writes each metric as a scalar under its own name."""

    def __init__(self) -> None:
        self._writer: Any = None

    @hookimpl
    def rlframework_run_started(self, run: RunInfo) -> None:
        """Open the event file. Imports TensorBoard, which takes seconds."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run.output_dir / "tensorboard"))

    @hookimpl
    def rlframework_step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the step's scalars."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
