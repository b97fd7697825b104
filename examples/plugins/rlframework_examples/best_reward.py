"""An observer that reports when the mean reward of a step is the best so far, and the best step at the end.

A hook declares only the arguments that it needs. An exception is reported once, and the run continues.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from rlframework.plugins.hookspec import RunInfo, hookimpl

_best: dict[Path, tuple[float, int]] = {}
"""Best reward and its step, by the folder of the run: a process may have several runs in turn."""


@hookimpl
def rlframework_run_started(run: RunInfo) -> None:
    """Reset the best reward."""
    _best[run.output_dir] = (-math.inf, 0)


@hookimpl
def rlframework_step_finished(run: RunInfo, step: int, metrics: Mapping[str, float]) -> None:
    """Compare the reward; supervised steps have none."""
    reward = metrics.get("train/reward")
    if reward is not None and reward > _best[run.output_dir][0]:
        _best[run.output_dir] = (reward, step)
        print(f"step {step}: best mean reward so far, {reward:.3f}")


@hookimpl
def rlframework_run_finished(run: RunInfo) -> None:
    """Print the best step."""
    reward, step = _best.pop(run.output_dir)
    print(f"best mean reward {reward:.3f} at step {step}" if step else "no step had a reward")
