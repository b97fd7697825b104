"""Which request goes to which engine: bookkeeping of a client, without asynchronous code, engines or clocks."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch

from rlframework.base.errors import EngineFault, RequestError, WorkerLost
from rlframework.generation.result_contract import Answer
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, Incoming, Outgoing

Outcome = tuple[str, GenerationResult | Exception]
"""The id of a request, and its result or error."""

_MOST_SESSIONS = 65_536
MOST_LOSSES = 3
"""Engines that may be lost while they have a request before it fails: it may be what they fail from."""


@dataclass(eq=False)
class _Entry:
    """A request that is waiting or with a lane. `pinned`: the lane to use; `losses`: engines lost that had it.

    `wanted`: not cancelled. `expired`: its time was up when an engine had it.
    """

    request: GenerationRequest
    pinned: int | None
    losses: int = 0
    lane: int | None = None
    wanted: bool = True
    expired: bool = False
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.request.prompt_ids.numel() + self.request.max_new_tokens


@dataclass(eq=False)
class _Lane:
    """An engine. `assigned` go out with the next exchange, `running` have gone out; `stale` are no longer expected."""

    alive: bool = True
    tokens: int = 0
    waiting: deque[_Entry] = field(default_factory=deque)
    assigned: dict[str, _Entry] = field(default_factory=dict)
    running: dict[str, _Entry] = field(default_factory=dict)
    abort: dict[str, None] = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)


class Scheduler:
    """Assigns requests to lanes: that of their session, otherwise the one with the fewest tokens in flight.

    A lane gets at most `limit` requests at a time; the others wait, in order of arrival. Tokens in flight are those of
    prompts and the most that may be generated. Every request that is added and not cancelled has exactly one outcome,
    which the method returns that brings it about.
    """

    def __init__(self, lanes: int, limit: int) -> None:
        self._limit = limit
        self._lanes = [_Lane() for _ in range(lanes)]
        self._lost: set[int] = set()
        self._free = [(0, lane) for lane in range(lanes)]
        """A heap with the tokens in flight of each lane that has room, and earlier states, which are skipped."""
        self._opened: set[int] = set()
        """Lanes that may have room for what waits for them."""
        self._news: set[int] = set()
        """Lanes that have got requests or aborts since `take_news` was called."""
        self._waiting: deque[_Entry] = deque()
        self._entries: dict[str, _Entry] = {}
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._loss: Exception | None = None

    def add(self, request: GenerationRequest, lane: int | None = None) -> None:
        """Accept a request, for `lane` if it is not lost.

        Raises `RequestError` for an id in use, and `WorkerLost` if all lanes are lost.
        """
        if request.request_id in self._entries:
            raise RequestError(f"request id {request.request_id!r} is in use; give each request an id of its own")
        if not self.alive:
            raise WorkerLost(f"all generation engines are lost: {self._loss}") from self._loss
        entry = self._entries[request.request_id] = _Entry(request, lane)
        self._waiting.append(entry)
        self._assign()

    def cancel(self, request_id: str) -> None:
        """Drop a request whose outcome is not needed; one that is with an engine is aborted there."""
        if (entry := self._entries.get(request_id)) is not None:
            entry.wanted = False
            self._stop(entry)

    def expire(self, request_id: str) -> list[Outcome]:
        """Abort a request: its outcome is what its engine returns, or nothing if no engine has seen it."""
        if (entry := self._entries.get(request_id)) is None:
            return []
        if self._stop(entry):
            return [_aborted(entry)]
        entry.expired = True
        return []

    def outgoing(self, lane: int) -> Outgoing:
        """Return what to send to `lane` now, which counts as sent."""
        own = self._lanes[lane]
        assigned, own.assigned = own.assigned, {}
        own.running |= assigned
        ids, own.abort = tuple(own.abort), {}
        return Outgoing(tuple(entry.request for entry in assigned.values()), ids)

    def answers(self, lane: int, results: Iterable[GenerationResult]) -> list[Answer]:
        """Return those of `results` that are awaited of `lane`, with their requests."""
        own, entries = self._lanes[lane], list[Answer]()
        for result in results:
            entry = own.running.get(result.request_id)
            if entry is not None and entry.wanted and result.request_id not in own.stale:
                entries.append(Answer(entry.request, result, entry.expired))
        return entries

    def received(self, lane: int, incoming: Incoming) -> list[Outcome]:
        """Take what `lane` has answered.

        Raises `EngineFault`, taking nothing, for a result of a request that it does not have, or two of one.
        """
        own, outcomes = self._lanes[lane], list[Outcome]()
        answers: list[Outcome] = [(result.request_id, result) for result in incoming.results]
        answers += incoming.rejected.items()
        for request_id, count in Counter(request_id for request_id, _ in answers).items():
            if count > (request_id in own.stale) + (request_id in own.running):
                raise EngineFault(f"it returned request {request_id!r}, which it does not have, or did so twice")
        for request_id, outcome in answers:
            if request_id in own.stale:
                own.stale.remove(request_id)
            else:
                entry = own.running[request_id]
                self._forget(entry)
                outcomes += [(request_id, outcome)] if entry.wanted else []
        self._assign()
        return outcomes

    def failed(self, lanes: Iterable[int], error: Exception) -> list[Outcome]:
        """Fail what is with `lanes`, which can still be used; what the engines still have of it is aborted."""
        outcomes: list[Outcome] = []
        for lane in lanes:
            own = self._lanes[lane]
            for request_id, entry in list(own.running.items()):
                self._forget(entry)
                own.stale.add(request_id)
                own.abort[request_id] = None
                outcomes += [(request_id, error)] if entry.wanted else []
        self._assign()
        return outcomes

    def lost(self, lanes: Collection[int], error: Exception) -> list[Outcome]:
        """Give what is with `lanes` to the others; it fails with `error` if none is left or at its third loss."""
        self._loss = error
        self._take_back(lanes, alive=False)
        return self._wait_again(error)

    def replaced(self, lanes: Iterable[int], error: Exception) -> list[Outcome]:
        """Use `lanes` again: they have new engines, which get what the earlier ones had, unless at its third loss."""
        self._take_back(lanes, alive=True)
        return self._wait_again(error)

    def _wait_again(self, error: Exception) -> list[Outcome]:
        """Drop what waits and is not wanted, has expired or was lost too often; assign the rest."""
        outcomes = list[Outcome]()
        waiting, self._waiting = self._waiting, deque()
        for entry in waiting:
            if entry.wanted and not entry.expired and self.alive and entry.losses < MOST_LOSSES:
                self._waiting.append(entry)
                continue
            if self._entries.get(entry.request.request_id) is entry:
                del self._entries[entry.request.request_id]
            if entry.wanted:
                outcomes.append(_aborted(entry) if entry.expired else (entry.request.request_id, error))
        self._assign()
        return outcomes

    def busy(self, lane: int) -> bool:
        """Whether `lane` has requests."""
        own = self._lanes[lane]
        return bool(own.assigned or own.running)

    @property
    def alive(self) -> bool:
        """Whether a lane is not lost."""
        return len(self._lost) < len(self._lanes)

    def take_news(self) -> set[int]:
        """Return the lanes that have got requests or aborts since the last call."""
        news, self._news = self._news, set()
        return news

    def in_flight(self, lane: int) -> tuple[int, int]:
        """Return the requests and the tokens in flight of `lane`."""
        own = self._lanes[lane]
        return len(own.assigned) + len(own.running), own.tokens

    # -- assignment ----------------------------------------------------------------------------------------------------

    def _assign(self) -> None:
        """Assign what waits to lanes that have room."""
        while self._opened:
            lane = self._opened.pop()
            while (waiting := self._lanes[lane].waiting) and self._has_room(lane):
                self._take(waiting.popleft(), lane)
        while self._waiting:
            entry = self._waiting[0]
            preferred = self._preferred(entry) if entry.wanted else None
            if entry.wanted and preferred is None:
                preferred = self._least_loaded()
                if preferred is None:
                    return
            self._waiting.popleft()
            if preferred is None:
                continue
            if session := entry.request.session_id:
                self._remember(session, preferred)
            if self._has_room(preferred):
                self._take(entry, preferred)
            else:
                self._lanes[preferred].waiting.append(entry)

    def _take_back(self, lanes: Iterable[int], *, alive: bool) -> None:
        """Let what is with `lanes` wait again, before what waits already, and make them lanes without requests."""
        held: list[_Entry] = []
        for lane in lanes:
            own, self._lanes[lane] = self._lanes[lane], _Lane(alive)
            (self._lost.discard if alive else self._lost.add)(lane)
            self._changed(lane)
            for entry in own.running.values():
                entry.losses += 1
            held += [*own.running.values(), *own.assigned.values(), *own.waiting]
        for entry in held:
            entry.lane = None
        self._waiting.extendleft(reversed(held))

    def _preferred(self, entry: _Entry) -> int | None:
        """Return the lane that a request must wait for: the one given, or that of its session."""
        session = entry.request.session_id
        lane = self._sessions.get(session) if entry.pinned is None and session else entry.pinned
        return lane if lane is not None and self._lanes[lane].alive else None

    def _remember(self, session: str, lane: int) -> None:
        self._sessions[session] = lane
        self._sessions.move_to_end(session)
        if len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)

    def _least_loaded(self) -> int | None:
        """Return the lane with the fewest tokens in flight, the first of several, among those that have room."""
        while self._free:
            tokens, lane = self._free[0]
            if self._lanes[lane].tokens == tokens and self._has_room(lane):
                return lane
            heapq.heappop(self._free)
        return None

    def _changed(self, lane: int) -> None:
        """Note that the requests of `lane` have changed."""
        own = self._lanes[lane]
        if not self._has_room(lane):
            return
        if own.waiting:
            self._opened.add(lane)
        heapq.heappush(self._free, (own.tokens, lane))
        if len(self._free) > 8 * len(self._lanes) + 64:  # mostly earlier states
            self._free = [(each.tokens, lane) for lane, each in enumerate(self._lanes) if self._has_room(lane)]
            heapq.heapify(self._free)

    def _has_room(self, lane: int) -> bool:
        own = self._lanes[lane]
        return own.alive and len(own.assigned) + len(own.running) < self._limit

    def _take(self, entry: _Entry, lane: int) -> None:
        if entry.wanted:
            entry.lane = lane
            self._lanes[lane].assigned[entry.request.request_id] = entry
            self._lanes[lane].tokens += entry.tokens
            self._news.add(lane)
            self._changed(lane)

    def _stop(self, entry: _Entry) -> bool:
        """Abort a request at its engine; if none has seen it, forget it and return True."""
        request_id = entry.request.request_id
        if entry.lane is not None and request_id in self._lanes[entry.lane].running:
            self._lanes[entry.lane].abort[request_id] = None
            self._news.add(entry.lane)
            return False
        entry.wanted = False  # it may be in a queue
        self._forget(entry)
        self._assign()
        return True

    def _forget(self, entry: _Entry) -> None:
        request_id = entry.request.request_id
        del self._entries[request_id]
        if entry.lane is not None:
            own = self._lanes[entry.lane]
            own.assigned.pop(request_id, None)
            own.running.pop(request_id, None)
            own.abort.pop(request_id, None)
            own.tokens -= entry.tokens
            self._changed(entry.lane)


def _aborted(entry: _Entry) -> Outcome:
    """Return the outcome of a request of which no engine has sampled a token."""
    request_id, no_tokens = entry.request.request_id, torch.empty(0, dtype=torch.int64)
    return request_id, GenerationResult(request_id, no_tokens, torch.empty(0, dtype=torch.float32), "aborted", ())
