"""The torch profiler of one worker: on for a while, then a trace on disk that Perfetto and Chrome open.

Left out: adding up what the trace says, and traces of the driver where workers are processes of their own.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from rlframework.errors import NotSupported, UserError


class TraceProfiler:
    """At most one torch profiler at a time, as torch has it."""

    def __init__(self) -> None:
        self._running: profile | None = None

    def start(self, *, with_stack: bool, record_shapes: bool, memory: bool) -> None:
        """From now on each operation is noted; `NotSupported` where this profiler is on already."""
        if self._running is not None:
            raise NotSupported("this worker is being profiled already; stop_profiling ends that")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._running = profile(
            activities=activities,
            record_shapes=record_shapes,
            profile_memory=memory,
            with_stack=with_stack,
            acc_events=True,  # torch warns of another future default otherwise
        )
        self._running.start()

    def stop(self, path: str | Path | None) -> bool:
        """Note no more, and write the trace (gzipped JSON) to `path`, which is there whole or not at all.

        None: it is thrown away. False where nothing was on. `UserError` where it cannot be written.
        """
        found, self._running = self._running, None
        if found is None:
            return False
        found.stop()
        if path is not None:
            _write(found, Path(path))
        return True


def _write(found: profile, path: Path) -> None:
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp.gz")  # torch compresses what ends so
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(new))
        os.replace(new, path)
    except OSError as error:
        raise UserError(
            f"the trace {str(path)!r} cannot be written: {error.strerror or error}; take a folder that can be "
            "written to"
        ) from error
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)
