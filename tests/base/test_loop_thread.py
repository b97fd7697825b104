"""A thread with an event loop: what is run in it, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from rlframework.base import loop_thread
from rlframework.base.errors import RLFrameworkError
from rlframework.base.loop_thread import LoopThread


async def name_of_thread() -> str:
    return threading.current_thread().name


def test_coroutines_are_run_in_the_loop_until_it_is_cancelled() -> None:
    thread = LoopThread(asyncio.Event().wait, "mine")
    assert thread.run(name_of_thread()) == "mine"
    thread.cancel()
    thread.join()
    assert isinstance(thread.result.exception(), asyncio.CancelledError)
    thread.cancel()  # does nothing


@pytest.mark.parametrize("fails", [True, False])
def test_the_end_of_the_work_ends_what_is_run_beside_it(fails: bool) -> None:
    ends = asyncio.Event()

    async def work() -> None:
        await ends.wait()
        if fails:
            raise ValueError("the work has failed")

    async def never() -> None:
        ends.set()
        await asyncio.Event().wait()

    thread = LoopThread(work, "mine")
    error, told = (ValueError, "the work has failed") if fails else (RLFrameworkError, "the thread of mine has ended")
    with pytest.raises(error, match=told):
        thread.run(never())


def test_an_interrupt_of_the_start_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller has no thread to end yet, and the work would go on beside what it does next."""
    begun, ended = threading.Event(), list[bool]()

    class Interrupted(threading.Event):
        interrupts = 1

        def wait(self, timeout: float | None = None) -> bool:
            super().wait(timeout)
            begun.wait()
            if Interrupted.interrupts:
                Interrupted.interrupts -= 1
                raise KeyboardInterrupt
            return True

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    monkeypatch.setattr(loop_thread, "threading", SimpleNamespace(Event=Interrupted, Thread=threading.Thread))
    with pytest.raises(KeyboardInterrupt):
        LoopThread(work, "work")
    assert ended == [True]
