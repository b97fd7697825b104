"""`GenerationClient`: asynchronous requests to several generation engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import accumulate

from rlframework.base.errors import DeadlineExceeded, EngineFault, RLFrameworkError, WorkerLost
from rlframework.generation.engine_handle import EngineHandle
from rlframework.generation.result_contract import ResultContract
from rlframework.generation.scheduler import Outcome, Scheduler
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, Incoming
from rlframework.observers.timeline import ENGINE, Timeline
from rlframework.weight_sync.receiver import listed

_SHORT, _LONGEST = 0.1, 30.0
"""Seconds of an exchange while requests come one by one and the engine is not notified of them, and of any exchange."""
_NOTIFIED = 1.0
"""Seconds of an exchange with an engine that is notified, more with many engines."""
_LATE = 1.0
"""Seconds after its end at which an exchange counts as late and is watched."""
_MOST_EXCHANGES, _FEW_EXCHANGES = 500, 20
"""Exchanges per second that may end without a result, of all engines together: with more engines each takes longer.

Few if no request is about to come that an engine could begin with: while only batches are generated, and if engines are
notified.
"""


class GenerationClient:
    """Distributes requests over engines, each of which is driven by a task while it has requests.

    Requests of a session go to the same engine, others to the one with the fewest tokens in flight. What a lost engine
    had is given to the others. Belongs to one event loop at a time: to another one after all requests have an outcome.
    """

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        *,
        limit: int,
        require_ready: Callable[[], object] = lambda: None,
        contract: ResultContract | None = None,
    ) -> None:
        """`limit`: requests that an engine has at a time; more wait in the client.

        `require_ready()` is called for each request, before and after each exchange; raises if the engines have no
        weights to serve requests with. `contract`: what results must hold; None: what is known without a model.
        """
        self._require_ready, self._contract = require_ready, contract or ResultContract()
        self.engines = list(engines)
        ends = list(accumulate(engine.lanes for engine in self.engines))
        self._lanes = [range(end - engine.lanes, end) for engine, end in zip(self.engines, ends, strict=True)]
        self.limit = limit
        """The most requests that an engine has at a time."""
        self.gather: Callable[[], Awaitable[None]] | None = None
        """Awaited before each exchange, to wait for requests that are about to come.

        While it is set, exchanges are short, so that requests which come one by one soon join those in progress.
        """
        self.lanes = ends[-1]
        """The number of engines that get their own requests; an engine handle may have several."""
        self._scheduler = Scheduler(self.lanes, limit)
        self._answers: dict[str, asyncio.Future[GenerationResult]] = {}
        self._single = 0
        """Requests that `generate` awaits: more of these may come at any time."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._engine_of = [index for index, lanes in enumerate(self._lanes) for _ in lanes]
        self._undriven: set[int] = set()
        """Engines whose task has ended before their requests."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exchanges: dict[int, Future[list[Incoming]]] = {}
        self._notified: set[int] = set()
        """Engines that were notified during their exchange."""
        self.busy_seconds = 0.0
        """The time of all exchanges, a sum over the engines."""
        self.timeline: Timeline | None = None
        """Gets a span for each exchange and each refit."""

    async def generate(
        self, request: GenerationRequest, *, timeout: float | None = None, lane: int | None = None
    ) -> GenerationResult:
        """Return the completion of `request`; if its time is up after `timeout` seconds, what there is, aborted.

        `lane`: the engine to use, unless it is lost. Cancelling the awaiting task aborts the request. Raises
        `RequestError` for a request that the engine rejects, `EngineFault` for a result that breaks the contract, and
        what the engine has failed with; a request is given to another engine only if its engine was lost (`WorkerLost`)
        or does not answer (`DeadlineExceeded`).
        """
        answer, timer = self._submit(request, lane), None
        self._drive()
        if timeout is not None:
            timer = asyncio.get_running_loop().call_later(timeout, self._expire, request.request_id)
        self._single += 1
        try:
            return await answer
        finally:
            self._single -= 1
            if timer is not None:
                timer.cancel()
            self._finish(request.request_id, answer)

    async def generate_all(
        self, requests: Sequence[GenerationRequest], lanes: Sequence[int | None]
    ) -> list[GenerationResult]:
        """Return the completions of `requests`, each for its lane, in order: like `generate`, without a task for each.

        After an error the others are aborted.
        """
        answers: dict[str, asyncio.Future[GenerationResult]] = {}
        try:
            for request, lane in zip(requests, lanes, strict=True):
                answers[request.request_id] = self._submit(request, lane)
            self._drive()
            return await asyncio.gather(*answers.values())
        finally:
            for request_id, answer in answers.items():
                self._finish(request_id, answer)

    def _submit(self, request: GenerationRequest, lane: int | None) -> asyncio.Future[GenerationResult]:
        self._require_ready()
        self._scheduler.add(request, lane)
        answer = self._answers[request.request_id] = asyncio.get_running_loop().create_future()
        return answer

    def _finish(self, request_id: str, answer: asyncio.Future[GenerationResult]) -> None:
        """Forget a request whose answer is not awaited any more; abort it if there is none."""
        if not answer.done() or answer.cancelled():
            self._scheduler.cancel(request_id)
            self._drive()
        else:
            answer.exception()  # counts as seen, also where this task was cancelled meanwhile
        del self._answers[request_id]

    def interrupt(self) -> None:
        """Abort all requests in progress, so that each gives what it has, as if its time was up."""
        for request_id in list(self._answers):
            self._expire(request_id)

    async def drain(self) -> None:
        """Wait until the engines have no requests; they may still have some whose task was cancelled.

        Raises `RLFrameworkError` if a request is awaited.
        """
        if self._answers:
            raise RLFrameworkError(
                f"{len(self._answers)} generation requests are in progress ({listed(self._answers)}); await or cancel "
                "them before the engines are given other weights"
            )
        self._drive()
        while driven := [task for index, task in self._tasks.items() if self._driven(index)]:
            await asyncio.wait(driven)

    def replaced(self, index: int, engine: EngineHandle) -> None:
        """Use `engine` instead of the lost one of this index."""
        lost, self.engines[index] = self.engines[index], engine
        self._exchanges.pop(index, None)
        self._answer(self._scheduler.replaced(self._lanes[index], WorkerLost(f"{lost.name} was lost")))

    def longest(self, engine: EngineHandle) -> float:
        """Return the seconds after which an exchange ends without a result, so that the engine gets what is new."""
        interval, most = engine.interval, _FEW_EXCHANGES
        if engine.notified:
            interval = _NOTIFIED
        elif self.gather is not None or self._single:
            interval = engine.interval if self.gather is None else min(engine.interval, _SHORT)
            most = _MOST_EXCHANGES
        return min(max(interval, len(self.engines) / most), _LONGEST)

    # -- engines -------------------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        """Start a task for each engine with requests; notify engines of what is new for them.

        Only engines that have got something since the last call may need it; after a change of event loop, any may.
        """
        loop, earlier = asyncio.get_running_loop(), self._loop
        self._loop = loop
        changed = {self._engine_of[lane] for lane in self._scheduler.take_news()} | self._undriven
        self._undriven = set()
        for index in sorted(changed) if loop is earlier else range(len(self._lanes)):
            if not any(map(self._scheduler.busy, self._lanes[index])):
                continue
            if not self._driven(index):
                task = self._tasks[index] = loop.create_task(self._exchange_while_busy(index))
                task.add_done_callback(partial(self._ended, index))
            exchange = self._exchanges.get(index)
            if exchange is not None and not exchange.done() and index not in self._notified:
                self._notified.add(index)
                self.engines[index].notify()

    def _ended(self, index: int, task: asyncio.Task[None]) -> None:
        if task is self._tasks.get(index) and any(map(self._scheduler.busy, self._lanes[index])):
            self._undriven.add(index)

    def _driven(self, index: int) -> bool:
        """Whether an engine has a task. One of an event loop that was closed never ends, so it does not count."""
        task = self._tasks.get(index)
        return task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop()

    async def _exchange_while_busy(self, index: int) -> None:
        while any(map(self._scheduler.busy, self._lanes[index])):
            if self.gather is not None:
                await self.gather()
            self._settle(await self._exchange(index))

    async def _exchange(self, index: int) -> Iterable[Outcome]:
        """Exchange once with an engine. An exchange that a cancelled task has left is completed first."""
        engine, lanes, outcomes = self.engines[index], self._lanes[index], list[Outcome]()
        begun = time.perf_counter()
        try:
            if index not in self._exchanges:
                outgoing = [self._scheduler.outgoing(lane) for lane in lanes]
                self._require_ready()  # a refit may have failed since the requests were accepted
                self._notified.discard(index)
                self._exchanges[index] = engine.exchange(outgoing, self.longest(engine))
            answers = await self._answers_of(index)
            del self._exchanges[index]
            self._require_ready()  # a refit may have failed meanwhile
            for lane, incoming in zip(lanes, answers, strict=True):
                outcomes += self._received(index, lane, incoming)
        except Exception as error:  # noqa: BLE001 - raised by `generate` of the requests that it concerns
            self._exchanges.pop(index, None)
            outcomes += self._failed(index, error)
        ended = time.perf_counter()
        self.busy_seconds += ended - begun
        if self.timeline is not None:
            self.timeline.add(f"{ENGINE}{index}", "generate", begun, ended)
        return outcomes

    def _received(self, index: int, lane: int, incoming: Incoming) -> list[Outcome]:
        """Check what a lane of an engine has answered, and take it. Raises `EngineFault` with the engine's name."""
        try:
            self._contract.require_form(incoming)
            self._contract.check(self._scheduler.answers(lane, incoming.results))
            return self._scheduler.received(lane, incoming)
        except EngineFault as error:
            raise self._contract.blamed(self.engines[index].name, error) from error

    async def _answers_of(self, index: int) -> list[Incoming]:
        engine = self.engines[index]
        late = asyncio.get_running_loop().call_later(self.longest(engine) + _LATE, engine.watch)
        try:
            return await _result(self._exchanges[index])
        except asyncio.CancelledError:
            engine.wait_if_shared()
            raise
        finally:
            late.cancel()

    def _failed(self, index: int, error: Exception) -> list[Outcome]:
        engine, lanes = self.engines[index], self._lanes[index]
        outcomes = list[Outcome]()
        if not (engine.lost and isinstance(error, (WorkerLost, DeadlineExceeded))):
            outcomes = self._scheduler.failed(lanes, error)
        return outcomes + (self._scheduler.lost(lanes, error) if engine.lost else [])

    def _settle(self, outcomes: Iterable[Outcome]) -> None:
        self._answer(outcomes)
        self._drive()

    def _answer(self, outcomes: Iterable[Outcome]) -> None:
        for request_id, outcome in outcomes:
            answer = self._answers.get(request_id)
            if answer is None or answer.done():
                continue
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

    def _expire(self, request_id: str) -> None:
        self._settle(self._scheduler.expire(request_id))


async def _result(future: Future[list[Incoming]]) -> list[Incoming]:
    """Wait for `future`, which goes on if the waiting task is cancelled, even after the end of its event loop."""
    if future.done():
        await asyncio.sleep(0)
        return future.result()
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not done.done():
            done.set_result(None)

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle)

    future.add_done_callback(wake)
    await done
    return future.result()
