"""The thread of episodes ends with what waits for it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rlframework.rollout.episode_thread import _LoopThread, run_beside


def test_work_is_cancelled_with_what_waits_for_it() -> None:
    started, ended = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def main() -> None:
        task = asyncio.ensure_future(run_beside(work, stalled_after=5.0, name="digits"))
        while not started.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(main())


def test_work_that_has_just_ended_can_be_cancelled() -> None:
    async def work() -> str:
        return "done"

    thread = _LoopThread(work)
    thread._thread.join(timeout=10)
    thread.cancel()
    assert thread.has_run()
    assert thread.result.result(timeout=0) == "done"
