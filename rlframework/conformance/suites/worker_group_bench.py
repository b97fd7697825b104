"""What the tests of `WorkerGroupSuite` work with: starts groups, asks them, and ends whatever is left of them."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlframework.config.sections import DeadlinesConfig, WorkerGroupConfig
from rlframework.conformance.bench import Bench
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerGroup, WorkerSpec

if TYPE_CHECKING:
    from rlframework.conformance.layouts import Layout

PROBE = "rlframework.conformance.probe_worker:ProbeWorker"
PATIENCE = 20.0
"""Seconds in which a failure must reach the driver while other workers are busy for longer."""


_SHARED: dict[Sequence[int], WorkerGroup] = {}
"""Groups that tests use in turn, by shape; all of one class and layout, which are the first entry of `_SHARED_BY`."""
_SHARED_BY: list[tuple[type, Layout]] = []


class WorkerGroupBench(Bench):
    """Starts groups, and sees to it that no test leaves one."""

    def group(self, shape: Sequence[int] | None = None) -> WorkerGroup:
        """A group that the tests before may have used, for those that leave it usable: a start takes its time."""
        if _SHARED_BY[:1] != [(self.part(), self.layout)]:
            _end_shared()
            _SHARED_BY.append((self.part(), self.layout))
        shape = shape or (self.layout.workers, 1)
        try:
            self.ask(_SHARED[shape], "forget")
        except Exception:  # noqa: BLE001 - there is none, or a test before ended it
            if shape in _SHARED:
                _shut_down(_SHARED.pop(shape))
            folder = self.folder / "shared"
            folder.mkdir(exist_ok=True)
            _SHARED[shape] = self._make(shape, WorkerSpec(PROBE, {"folder": str(folder), "word": "oak"}), call=60.0)
        return _SHARED[shape]

    def start(self, target: str = PROBE, spec: WorkerSpec | None = None, **settings: Any) -> WorkerGroup:
        """A group of this test's own, for what ends it.

        `settings` that are names of deadlines are deadlines; all others are arguments of the worker.
        """
        deadlines = {name: settings.pop(name) for name in DeadlinesConfig.model_fields if name in settings}
        spec = spec or WorkerSpec(target, {"folder": str(self.folder), **settings})
        self.resources.callback(self._end_what_is_left)
        group = self._make((self.layout.workers, 1), spec, **deadlines)
        self.resources.callback(_shut_down, group)
        return group

    def _make(self, shape: Sequence[int], spec: WorkerSpec, **deadlines: float) -> WorkerGroup:
        """`shape` is the data and tensor parallel sizes."""
        model = self.record.config_model or WorkerGroupConfig
        config: Any = model(
            name=self.record.name,
            num_workers=shape[0] * shape[1],
            deadlines=DeadlinesConfig(**deadlines),
            **self.section,
        )
        ranks = torch.arange(config.num_workers).reshape(*shape).numpy()
        sharding = NamedSharding(ranks, ["data_parallel", "tensor_parallel"])
        group: WorkerGroup = self.part()(spec, config, sharding=sharding, device=self.device)
        return group

    def ask(self, group: WorkerGroup, method: str, **kwargs: Any) -> list[Any]:
        """Call all workers with the same arguments and wait."""
        return group.get_all_worker_results(group.run_all_workers_single_data(method, **kwargs))

    def within(self, seconds: float, what: str, call: Callable[[], Any]) -> Any:
        """What `call` returns or raises, for which it must take less than `seconds`."""
        begun = time.monotonic()
        try:
            return call()
        finally:
            took = time.monotonic() - begun
            self.require(took < seconds, f"{what} takes no longer than it may", got=took, expected=f"under {seconds} s")

    def passes(self, what: str, call: Callable[[], Any]) -> None:
        """`call` must not raise."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            self.require(False, f"{what} raises nothing", got=f"{type(error).__name__}: {error}", expected="no error")

    def processes(self) -> list[int]:
        """Ids of the worker processes that ran in this test, without the driver's own."""
        pids = [int(path.name.partition("-")[2]) for path in self.folder.glob("pid-*")]
        return sorted(pid for pid in pids if pid != os.getpid())

    def require_nobody_left(self, after: str) -> None:
        """No worker process of this test may run; the system is given a moment to bury them."""
        until = time.monotonic() + 3.0
        while (left := [pid for pid in self.processes() if _runs(pid)]) and time.monotonic() < until:
            time.sleep(0.02)
        self.equal(f"no worker process is left after {after}", left, [])

    def _end_what_is_left(self) -> None:
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
    """Whether a process is there and more than an entry in the table of those that ended."""
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat")
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    return False
