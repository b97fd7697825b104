"""A plugin that ends a step of a worker where rlframework reports it, the last thing that its loop does."""

from __future__ import annotations

from collections.abc import Mapping

from steps import steps

from rlframework.plugins.hookspec import hookimpl


@hookimpl
def rlframework_step_finished(metrics: Mapping[str, float]) -> None:
    """Answer with the step's metrics, and wait for the next step."""
    names = {"loss": "train/loss", "grad_norm": "train/grad_norm", "tokens": "train/tokens"}
    steps().done(lambda: {name: metrics[key] for name, key in names.items() if key in metrics})
