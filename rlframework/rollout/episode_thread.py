"""A thread with an event loop of its own for episodes, beside the one that serves their requests.

An engine in the driver's process keeps the driver's thread for a tenth of a second at a time. Environments and agents
would wait as long at each of their steps, and their deadlines would measure the engine. So they run here, and send each
prompt to the driver's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from rlframework.base.errors import UserError
from rlframework.base.loop_thread import LoopThread
from rlframework.generation.completions import Completions
from rlframework.interfaces.generation import GenerationResult, SamplingParams

if TYPE_CHECKING:
    from rlframework.config.sections import EnvironmentConfig
    from rlframework.generation.client import GenerationClient

R = TypeVar("R")

_CLOSING = 5.0
"""Seconds to wait for what is left after an error, in addition to a deadline of steps."""

_LOOKS = 10
"""Looks at the loop within `stalled_after` seconds: with one, a process that was paused would seem to be blocked."""


class Bridge:
    """Completes prompts for episodes in another thread, on engines that are driven by the loop of this constructor.

    An episode is `away` from its answer until its next request or its end. Exchanges with the engines wait for those
    away, up to `timeout` seconds after the last that came (0: they do not wait): a request that misses an exchange is
    not decoded until the next. If none takes longer, it does not depend on time which requests are decoded together.
    """

    def __init__(self, completions: Completions, timeout: float) -> None:
        self._completions, self._loop = completions, asyncio.get_running_loop()
        self._timeout = timeout
        self.positions, self.max_new_tokens = completions.positions, completions.max_new_tokens
        self.sampling, self.timeline = completions.sampling, completions.timeline
        self._away = set[str]()
        self._came = asyncio.Event()

    def begin(self) -> str:
        """Return the session id of a new episode, which is away now. Called in the episodes' thread."""
        session = self._completions.session()
        self._loop.call_soon_threadsafe(self._left, session)
        return session

    def end(self, session: str) -> None:
        """Note that an episode makes no more requests. Called in the episodes' thread."""
        self._loop.call_soon_threadsafe(self._back, session)

    async def complete(
        self,
        prompt_ids: Sequence[int] | Tensor,
        seed: int,
        max_new_tokens: int,
        session: str,
        sampling: SamplingParams | None = None,
        *,
        share_prefix: bool = True,
        media: Mapping[str, Tensor] | None = None,
    ) -> GenerationResult:
        """Return the completion of a prompt, see `Completions.complete`. Called in the episodes' thread.

        `share_prefix`: whether the engine keeps what it computes for later requests of `session`.
        """
        shared = session if share_prefix else None
        complete = partial(self._completions.complete, prompt_ids, seed, max_new_tokens, shared, sampling, media)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._here(session, complete), self._loop))

    async def complete_group(
        self, prompt_ids: Tensor, seeds: Sequence[int], session: str, media: Mapping[str, Tensor] | None = None
    ) -> list[GenerationResult]:
        """Return a completion of a prompt for each of `seeds`. Called in the episodes' thread.

        One call, as each passage between the threads costs about as much as the driver's other work for a row.
        """
        rows = self._complete_group(prompt_ids, seeds, session, media)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(rows, self._loop))

    async def gather(self) -> None:
        """See `GenerationClient.gather`."""
        await asyncio.sleep(0)  # until those whose answers were set are away
        while self._away:
            self._came.clear()
            try:
                async with asyncio.timeout(self._timeout):
                    await self._came.wait()
            except TimeoutError:
                self._away.clear()

    async def _here(self, session: str, complete: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Return what `complete()` does; the episode of `session` is not away meanwhile."""
        self._back(session)
        try:
            return await complete()
        finally:
            self._left(session)

    async def _complete_group(
        self, prompt_ids: Tensor, seeds: Sequence[int], session: str, media: Mapping[str, Tensor] | None
    ) -> list[GenerationResult]:
        self._loop.call_soon(self._back, session)  # the rows' tasks make their requests before `gather` goes on
        complete, most = self._completions.complete, self.max_new_tokens
        return await gather_or_cancel([complete(prompt_ids, seed, most, media=media) for seed in seeds])

    def _left(self, session: str) -> None:
        if self._timeout > 0:  # otherwise, those of a server that goes on for months would be kept
            self._away.add(session)

    def _back(self, session: str) -> None:
        self._away.discard(session)
        self._came.set()


async def play_beside(
    work: Callable[[Bridge], Coroutine[Any, Any, R]],
    completions: Completions,
    client: GenerationClient,
    config: EnvironmentConfig,
    *,
    gathered: bool,
) -> R:
    """Run `work(bridge)` as `run_beside`, with a bridge to `completions` on the engines of `client`.

    `gathered`: whether exchanges with the engines wait for episodes that are away.
    """
    bridge = Bridge(completions, config.gather_timeout)
    client.gather = bridge.gather if gathered else None
    try:
        return await run_beside(partial(work, bridge), stalled_after=config.step_timeout, name=config.name)
    finally:
        client.gather = None


async def run_beside(work: Callable[[], Coroutine[Any, Any, R]], *, stalled_after: float, name: str) -> R:
    """Run `work()` in an event loop in another thread, and return its result; cancelling this cancels it.

    Raises `UserError` if that loop does not run for `stalled_after` seconds, while this one does, because the
    environment `name` blocks it.
    """
    thread = LoopThread(work, "episodes")
    result = asyncio.wrap_future(thread.result)
    try:
        missed = 0
        while not (await asyncio.wait({result}, timeout=stalled_after / _LOOKS))[0]:
            missed = 0 if thread.has_run() else missed + 1
            if missed == _LOOKS:
                raise UserError(
                    f"environment {name!r} blocks the event loop of all episodes for more than {stalled_after:g} "
                    f"seconds ({thread.place()}); await what takes long (in an agent: AsyncOpenAI), "
                    "or run it with asyncio.to_thread"
                )
        returned: R = result.result()
        return returned
    finally:
        if not result.done():
            thread.cancel()
            await asyncio.wait({result}, timeout=stalled_after + _CLOSING if thread.has_run() else _CLOSING)
            result.cancel()


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
    """Run all, and return their results in order. After an error, cancel and await the others, then raise it."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
