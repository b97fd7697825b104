"""The harness of `WorkerGroupSuite`: starts groups, calls them, and ends any process they leave."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import psutil
import torch

from rlframework.config.sections import DeadlinesConfig, WorkerGroupConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerGroup, WorkerSpec
from rlframework_conformance.harness import Harness

if TYPE_CHECKING:
    from rlframework_conformance.layouts import Layout

PROBE = "rlframework_conformance.probe_worker:ProbeWorker"
PATIENCE = 40.0
"""Seconds within which a failure must reach the driver while other workers are still busy."""


_SHARED: dict[Sequence[int], WorkerGroup] = {}
"""Groups reused across tests, by shape; all have the class and layout in `_SHARED_BY`."""
_SHARED_BY: list[tuple[type, Layout]] = []


class WorkerGroupHarness(Harness):
    """Starts worker groups and ensures that no test leaves one running."""

    def group(self, shape: Sequence[int] | None = None) -> WorkerGroup:
        """Return a group that may be shared with other tests, for tests that leave it usable; starting one is slow."""
        if _SHARED_BY[:1] != [(self.load_class(), self.layout)]:
            _end_shared()
            _SHARED_BY.append((self.load_class(), self.layout))
        shape = shape or (self.layout.workers, 1)
        try:
            self.ask(_SHARED[shape], "forget")
        except Exception:  # noqa: BLE001 - there is none yet, or an earlier test ended it
            if shape in _SHARED:
                _shut_down(_SHARED.pop(shape))
            folder = self.folder / "shared"
            folder.mkdir(exist_ok=True)
            _SHARED[shape] = self._make(shape, WorkerSpec(PROBE, {"folder": str(folder), "word": "oak"}), call=60.0)
        return _SHARED[shape]

    def start(self, target: str = PROBE, spec: WorkerSpec | None = None, **settings: Any) -> WorkerGroup:
        """Start a group for this test only, for tests that end it.

        `settings` named after deadlines are deadlines; all others are arguments of the worker.
        """
        deadlines = {name: settings.pop(name) for name in DeadlinesConfig.model_fields if name in settings}
        spec = spec or WorkerSpec(target, {"folder": str(self.folder), **settings})
        self.resources.callback(self._kill_remaining_processes)
        group = self._make((self.layout.workers, 1), spec, **deadlines)
        self.resources.callback(_shut_down, group)
        return group

    def _make(self, shape: Sequence[int], spec: WorkerSpec, **deadlines: float) -> WorkerGroup:
        """Create a group; `shape` is the data-parallel and the tensor-parallel size."""
        model = self.record.config_model or WorkerGroupConfig
        config: Any = model(
            name=self.record.name,
            num_workers=shape[0] * shape[1],
            deadlines=DeadlinesConfig(**deadlines),
            **self.section,
        )
        ranks = torch.arange(config.num_workers).reshape(*shape).numpy()
        sharding = NamedSharding(ranks, ["data_parallel", "tensor_parallel"])
        group: WorkerGroup = self.load_class()(spec, config, sharding=sharding, device=self.device)
        return group

    def ask(self, group: WorkerGroup, method: str, **kwargs: Any) -> list[Any]:
        """Call all workers with the same arguments and wait for the results."""
        return group.get_all_worker_results(group.run_all_workers_single_data(method, **kwargs))

    def within(self, seconds: float, what: str, call: Callable[[], Any]) -> Any:
        """Return or raise what `call` does, which must take less than `seconds`."""
        started = time.monotonic()
        try:
            return call()
        finally:
            took = time.monotonic() - started
            self.require(took < seconds, f"{what} must finish in time", got=took, expected=f"under {seconds} s")

    def fails_in_time(self, error: type[Exception], what: str, call: Callable[[], Any], match: str) -> BaseException:
        """Require `call` to raise `error`, as `raises` does, while other workers are still busy."""
        return self.raises(error, lambda: self.within(PATIENCE, "reporting the failure", call), what, match)

    def processes(self) -> list[int]:
        """Return the ids of the worker processes of this test, without the driver's own."""
        pids = [int(path.name.partition("-")[2]) for path in self.folder.glob("pid-*")]
        return sorted(pid for pid in pids if pid != os.getpid())

    def require_no_process_left(self, after: str) -> None:
        """Require that no worker process of this test is running, after a grace period for the operating system."""
        until = time.monotonic() + 20.0
        while (left := [pid for pid in self.processes() if _runs(pid)]) and time.monotonic() < until:
            time.sleep(0.02)
        self.equal(f"worker processes left after {after}", left, [])

    def _kill_remaining_processes(self) -> None:
        for pid in filter(_runs, self.processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _shut_down(group: WorkerGroup) -> None:
    with contextlib.suppress(Exception):
        group.shutdown()


@atexit.register
def _end_shared() -> None:
    for group in _SHARED.values():
        _shut_down(group)
    _SHARED.clear()
    _SHARED_BY.clear()


def _runs(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False
