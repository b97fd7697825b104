"""Profile the steps of a run that the section `profiler` selects, with one trace per step and worker.

    traces/step-000003/rank-0.json.gz     the torch profiler's trace of rank 0 in step 3, gzipped JSON

The trace excludes validation and checkpoints after the step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlframework.algorithm import Parts

_LOG = logging.getLogger(__name__)

FOLDER = "traces"
"""Folder of the traces in a run's folder."""


class Profiling:
    """Profiles the policy of `parts` in the selected steps."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config.profiler
        self._wanted = set(self._config.wanted)
        self._written: list[str] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile the block as step `step`. A step that fails leaves no trace, as its workers may be gone."""
        if step not in self._wanted:
            yield
            return
        policy, config = self._parts.policy, self._config
        policy.start_profiling(
            ranks=config.ranks, with_stack=config.with_stack, record_shapes=config.record_shapes, memory=config.memory
        )
        try:
            yield
        except BaseException:
            with suppress(Exception):  # raise the step's own error
                policy.stop_profiling(None)
            raise
        folder = self._parts.config.output_dir.absolute() / FOLDER / f"step-{step:06d}"
        self._written += policy.stop_profiling(str(folder))
        self._wanted.discard(step)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """On exit, log where the traces are and how to open them."""
        try:
            yield
        finally:
            if self._written:
                lines = "\n".join(f"  {path}" for path in self._written)
                how = "open them in https://ui.perfetto.dev (they stay in the browser) or chrome://tracing"
                _LOG.info("traces of the profiled steps; %s:\n%s", how, lines)
