"""A worker group: processes on this machine, with a warning about each slow call."""

from __future__ import annotations

import logging
import time
from typing import Any

from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerSpec
from rlframework.workers.processes import ProcessWorkerGroup

from rlframework_examples.plugin import StopwatchConfig

_LOG = logging.getLogger(__name__)


class StopwatchGroup(ProcessWorkerGroup):
    """`processes` that reports slow calls."""

    def __init__(self, spec: WorkerSpec, config: StopwatchConfig, *, sharding: NamedSharding, device: str) -> None:
        self._slow = config.slow_seconds
        super().__init__(spec, config, sharding=sharding, device=device)

    def get_all_worker_results(self, future: MultiWorkerFuture, **keys: Any) -> list[Any]:
        """See `WorkerGroup.get_all_worker_results`; a failing call is reported too."""
        begun = time.perf_counter()
        try:
            return super().get_all_worker_results(future, **keys)
        finally:
            seconds = time.perf_counter() - begun
            if seconds >= self._slow:
                _LOG.warning("the answers of %d workers took %.1f s", self.sharding.size, seconds)
