"""Worker processes that serve one policy after another, for the suites and parity.

A process that has run an engine before has all imported and its caches filled: the next policy is up in a fraction of
the time. A group that was shut down in peace gives its processes back; where anything failed they are ended. One idle
set is kept, of one backend in one layout, and each process serves so many policies and no more, since what libraries
leave behind in it piles up. Policies of one worker run in the driver's process one after another anyway.
"""

from __future__ import annotations

import atexit
from dataclasses import dataclass, field
from typing import Any

from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers.process_peer import Peer, Surroundings
from rlframework.workers.processes import ProcessWorkerGroup

_USES = 30


@dataclass
class _Idle:
    """Processes by rank that wait for a policy like those before it."""

    like: tuple[Any, ...] = ()
    surroundings: dict[int, Surroundings] = field(default_factory=dict)
    peers: dict[int, Peer] = field(default_factory=dict)
    uses: int = 0


_idle = _Idle()


def end_idle() -> None:
    """End the processes that wait for another policy."""
    global _idle
    old, _idle = _idle, _Idle()
    for peer in old.peers.values():
        peer.kill()
    for peer in old.peers.values():
        peer.close()


atexit.register(end_idle)  # after that of multiprocessing, which waits for its children, so that it is called before


class WarmWorkerGroup(ProcessWorkerGroup):
    """Takes idle processes where they served policies of the same backend and layout; gives its own back."""

    def _start_hosts(self, spec: WorkerSpec, device: str) -> None:
        self._like = (spec.kwargs.get("inner", spec.target), device, str(self._sharding))
        self._surroundings: dict[int, Surroundings] = {}
        self._uses = 0
        super()._start_hosts(spec, device)

    def _peer(self, rank: int, method: Any, surroundings: Surroundings) -> Peer:
        self._surroundings[rank] = surroundings
        if rank == 0 and not self._fits(surroundings):
            end_idle()
        if rank not in _idle.peers:
            return super()._peer(rank, method, surroundings)
        self._uses = _idle.uses
        peer = _idle.peers.pop(rank)
        peer.serve_next(self._answers)
        return peer

    def _fits(self, surroundings: Surroundings) -> bool:
        return self._like == _idle.like and surroundings == _idle.surroundings[0] and _idle.uses < _USES

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        """See `WorkerGroup`; processes that came to the end of `cleanup_method` are kept."""
        running = self._ended is None and cleanup_method is not None
        peaceful = self._clean_up(cleanup_method, timeout)
        if running and peaceful:
            self._give_back()
        return self._end("it was shut down") and peaceful

    def _give_back(self) -> None:
        global _idle
        refs = {rank: self._ask(rank, "forget") for rank in range(len(self._peers))}
        self._wait(refs, "forgetting a worker", "shutdown", self._deadlines.shutdown)
        end_idle()  # none of ours: those were taken out
        peers, self._peers, self._pids = dict(enumerate(self._peers)), [], {}
        _idle = _Idle(self._like, self._surroundings, peers, self._uses + 1)
