"""The thread in which the engines are driven for tickets, beside the one in which their groups are played."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from rlframework.base.loop_thread import LoopThread
from rlframework.generation.interruptible import InterruptibleCompletions
from rlframework.rollout.episode_thread import Bridge, play_beside
from rlframework.rollout.tickets import Ticket

if TYPE_CHECKING:
    from rlframework.rollout.group_players import GroupPlayer


class TicketThread:
    """Plays all tickets that `admit` returns with `play`, from `start` until `end` or `abort`.

    Its methods are called in the driver's thread. The tasks of the tickets belong to the loop of the players, and the
    completions to the loop of the engines.
    """

    def __init__(
        self,
        player: GroupPlayer[Any],
        admit: Callable[[], Ticket[int] | None],
        play: Callable[[Ticket[int]], Coroutine[Any, Any, None]],
        ended: Callable[[], None],
        *,
        gathered: bool,
    ) -> None:
        """Start nothing. `ended()` is called in the thread when it ends.

        `gathered`: whether the rows of a step are decoded together, as in synchronous runs.
        """
        self._player, self._admit, self._play, self._ended, self._gathered = player, admit, play, ended, gathered
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._raised: list[asyncio.Task[None]] = []
        self._ending = False
        self._ready: Future[None] = Future()

    # -- the driver's thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, and wait until it plays tickets."""
        self._thread = LoopThread(self._serve, "rollouts")
        self._thread.result.add_done_callback(lambda _: self._ended())
        futures: list[Future[None]] = [self._ready, self._thread.result]
        wait(futures, return_when=FIRST_COMPLETED)
        self.require_no_error()

    @property
    def alive(self) -> bool:
        """Whether the thread has not ended."""
        return not self._thread.result.done()

    @property
    def without_engines(self) -> bool:
        """Whether a request waits because all engines are lost."""
        return self._completions.lost

    def require_no_error(self) -> None:
        """Raise what has ended the thread."""
        if not self.alive and (error := self._thread.result.exception()) is not None:
            raise error

    def stop_requests(self, *, interrupt: bool) -> None:
        """Wait until the engines have no requests, which end where they are with `interrupt`; send none after that."""
        self.require_no_error()
        self._thread.run(self._completions.close(interrupt=interrupt))

    def send_requests(self) -> None:
        """Send requests again, and play what may be admitted now."""
        self.require_no_error()
        self._thread.run(self._completions.open())
        self.wake()

    def wake(self) -> None:
        """Play what may be admitted now."""
        self._call(self._woken.set)

    def cancel(self, number: int) -> None:
        """Stop playing the ticket of this number, which has failed."""
        self._call(self._cancel, number)

    def end(self) -> None:
        """Admit nothing more, and end when what is played now is settled."""
        self._ending = True
        self.wake()

    def abort(self) -> None:
        """Stop what is still played, and wait for the end of the thread."""
        self._thread.cancel()
        self._thread.join()

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended, of which `require_no_error` raises the reason
            self._player_loop.call_soon_threadsafe(function, *arguments)

    # -- the loop of the engines ---------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        parts, stops = self._player.parts, self._player.stop_token_ids
        async with parts.generation.completions(stop_token_ids=stops, kind=InterruptibleCompletions) as completions:
            assert isinstance(completions, InterruptibleCompletions)
            self._completions = completions
            client, config = parts.generation.client, parts.config.environment
            await play_beside(self._play_tickets, completions, client, config, gathered=self._gathered)

    # -- the loop of the players ---------------------------------------------------------------------------------------

    async def _play_tickets(self, bridge: Bridge) -> None:
        """Play each ticket that is admitted, until `end`. Raises what a task has raised."""
        self._player_loop, self._woken = asyncio.get_running_loop(), asyncio.Event()
        async with self._player.playing(bridge):
            self._ready.set_result(None)
            try:
                while not (self._ending and not self._tasks):
                    self._woken.clear()
                    while not self._ending and (ticket := self._admit()) is not None:
                        task = self._tasks[ticket.number] = asyncio.create_task(self._play(ticket))
                        task.add_done_callback(partial(self._played, ticket.number))
                    if self._raised:
                        self._raised[0].result()
                    await self._woken.wait()
            finally:
                tasks = list(self._tasks.values())
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _played(self, number: int, task: asyncio.Task[None]) -> None:
        """Forget a task that is done; keep one that has raised for `_play_tickets`. Those cancelled are forgotten."""
        if self._tasks.pop(number, None) is not None and (task.cancelled() or task.exception() is not None):
            self._raised.append(task)
        self._woken.set()

    def _cancel(self, number: int) -> None:
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()
        self._woken.set()
