"""A thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any, Generic, TypeVar

from rlframework.base.errors import RLFrameworkError
from rlframework.base.notebook_tracebacks import is_users_code

R = TypeVar("R")
T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class LoopThread(Generic[R]):
    """Runs `work()` in an event loop in a daemon thread: one that blocks does not keep the process from ending.

    `result`: of the work. `loop`: in which it runs.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, R]], name: str) -> None:
        """Return when the work has begun."""
        self.result: Future[R] = Future()
        self.result.set_running_or_notify_cancel()  # so that cancelling it never races with its result
        self._name, self._asked = name, False
        self._beat = threading.Event()
        self._ready = threading.Event()
        _LOG.debug("%s: starting the thread of their event loop", name)
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(work),), name=name, daemon=True)
        try:
            self._thread.start()
            self._ready.wait()
        except KeyboardInterrupt:  # nobody has this object yet, who could end the work
            self.end()
            raise

    async def _run(self, work: Callable[[], Coroutine[Any, Any, R]]) -> None:
        self.loop = asyncio.get_running_loop()
        self._task = self.loop.create_task(work())
        self._ready.set()
        try:
            outcome = await self._task
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            _LOG.debug("%s: their thread ends; raised: %s", self._name, type(error).__name__)
            self.result.set_exception(error)
        else:
            _LOG.debug("%s: their thread ends; raised: nothing", self._name)
            self.result.set_result(outcome)

    def run(self, more: Coroutine[Any, Any, T]) -> T:
        """Return the result of `more` in the loop. It is cancelled if the caller is interrupted.

        Raises what has ended the work if that comes before.
        """
        future: Future[T] = asyncio.run_coroutine_threadsafe(more, self.loop)
        futures: list[Future[Any]] = [future, self.result]
        try:
            wait(futures, return_when=FIRST_COMPLETED)
        except BaseException:
            future.cancel()
            raise
        if future.cancelled() or not future.done():
            self.result.result()
            raise RLFrameworkError(f"the thread of {self._name} has ended")
        return future.result()

    def has_run(self) -> bool:
        """Whether the loop has run since the last call, or its beginning."""
        ran = self._beat.is_set() or not self._asked
        self._beat.clear()
        self._asked = True
        self.call(self._beat.set)
        return ran

    def cancel(self) -> None:
        """Cancel the work."""
        self.call(self._task.cancel)

    def end(self) -> None:
        """Cancel the work, and wait until it has ended, also if that is interrupted: else it would go on unseen."""
        cancelled = False
        while not self.result.done():
            with suppress(KeyboardInterrupt):
                self._ready.wait()
                if not cancelled:
                    self.cancel()
                    cancelled = True
                wait([self.result])

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` in the loop, unless the work has ended and closed it."""
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def place(self) -> str:
        """Return the line of the user's code that the thread is at, or else the line of the library."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        if not stack:
            return "its thread has ended"
        at = next((each for each in reversed(stack) if is_users_code(each.filename)), stack[-1])
        return f"{at.filename}:{at.lineno} in {at.name}"
