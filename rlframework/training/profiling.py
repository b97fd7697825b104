"""The steps of a run that are profiled, as the section `profiler` says: one trace a step and worker.

    traces/step-000003/rank-0.json.gz     what the torch profiler saw of rank 0 in step 3, gzipped JSON

Validation and checkpoints after a step are not in its trace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlframework.algorithm import Parts

FOLDER = "traces"
"""Where traces lie in the folder of a run."""


class Profiling:
    """Profiles the chosen steps of the policy of `parts`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config.profiler
        self._wanted = set(self._config.wanted)
        self._written: list[str] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around step `step`. A step that fails leaves no trace; the workers may not be there any more."""
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
            with suppress(Exception):  # the step's own error is the one to see
                policy.stop_profiling(None)
            raise
        folder = self._parts.config.output_dir.absolute() / FOLDER / f"step-{step:06d}"
        self._written += policy.stop_profiling(str(folder))
        self._wanted.discard(step)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around all steps: say at the end, on stderr, where the traces are and how they are opened."""
        try:
            yield
        finally:
            if self._written:
                lines = "\n".join(f"  {path}" for path in self._written)
                how = "drop one into https://ui.perfetto.dev (it stays in the browser) or chrome://tracing"
                print(f"traces of profiled steps; {how}:\n{lines}", file=sys.stderr, flush=True)
