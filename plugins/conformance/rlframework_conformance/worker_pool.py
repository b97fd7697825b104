"""Worker processes that serve several policies in turn, for the suites and parity.

A process that has run an engine has its modules imported and its caches filled, so the next policy starts in a fraction
of the time. A group that shuts down without failure returns its processes; after any failure they are ended. One idle
set is kept, for one backend in one layout, and each process serves a limited number of policies, because libraries
accumulate state. Policies of one worker run in the driver's process anyway.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers.processes import Peer, ProcessWorkerGroup
from rlframework.workers.temporary import TemporaryFolder

_MAX_USES = 30


@dataclass
class _Idle:
    """Idle processes by rank, for a policy like the previous ones."""

    like: tuple[Any, ...] = ()
    environments: dict[int, dict[str, str]] = field(default_factory=dict)
    peers: dict[int, Peer] = field(default_factory=dict)
    uses: int = 0


_idle = _Idle()


def end_idle() -> None:
    """End the idle processes."""
    global _idle
    old, _idle = _idle, _Idle()
    for peer in old.peers.values():
        peer.kill()
    for peer in old.peers.values():
        peer.close()


atexit.register(
    end_idle
)  # registered after multiprocessing's handler, which waits for its children, so that it runs first


class _SharedFolder(TemporaryFolder):
    """A folder for temporary files that groups share, because a process that serves several keeps its TMPDIR."""

    def remove(self) -> None:
        """Leave the folder: it is removed at exit."""


@cache
def _shared_folder(parent: str | None) -> _SharedFolder:
    folder = _SharedFolder(parent)
    atexit.register(TemporaryFolder.remove, folder)
    return folder


class WarmWorkerGroup(ProcessWorkerGroup):
    """Reuses idle processes that served policies of the same backend and layout, and returns its own."""

    def _temporary_folder(self, parent: str | None) -> TemporaryFolder:
        return _shared_folder(parent)

    def _start_hosts(self, spec: WorkerSpec, device: str) -> None:
        self._like = (spec.kwargs.get("inner", spec.target), device, str(self._sharding), os.getcwd())
        self._environments: dict[int, dict[str, str]] = {}
        self._uses = 0
        super()._start_hosts(spec, device)

    def _peer(self, rank: int, method: Any, environment: dict[str, str]) -> Peer:
        self._environments[rank] = environment
        if rank == 0 and not self._fits(environment):
            end_idle()
        if rank not in _idle.peers:
            return super()._peer(rank, method, environment)
        self._uses = _idle.uses
        return _idle.peers.pop(rank)

    def _fits(self, environment: dict[str, str]) -> bool:
        return self._like == _idle.like and environment == _idle.environments[0] and _idle.uses < _MAX_USES

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        """See `WorkerGroup`; processes that completed `cleanup_method` are kept."""
        running = self._ended is None and cleanup_method is not None
        peaceful = self._clean_up(cleanup_method, timeout)
        if running and peaceful:
            self._give_back()
        return self._end("it was shut down") and peaceful

    def _give_back(self) -> None:
        global _idle
        refs = {rank: self._send(rank, "forget") for rank in range(len(self._peers))}
        self._wait(refs, "forgetting a worker", "shutdown", self._deadlines.shutdown)
        end_idle()  # not those of this group, which were removed before
        peers, self._peers, self._pids = dict(enumerate(self._peers)), [], {}
        _idle = _Idle(self._like, self._environments, peers, self._uses + 1)
