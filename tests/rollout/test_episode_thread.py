"""The thread of episodes ends with its caller, and the engines get the requests of a group together."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from rlframework.base.errors import UserError
from rlframework.base.loop_thread import LoopThread
from rlframework.interfaces.generation import SamplingParams
from rlframework.rollout.episode_thread import Bridge, run_beside


class RecordingCompletions:
    """The result of a completion is its seed."""

    positions, max_new_tokens, sampling, timeline = None, 4, SamplingParams(), None

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def session(self) -> str:
        return "session"

    async def complete(self, _prompt: Any, seed: int, most: int, media: Any = None) -> int:
        assert (most, media) == (4, {"pixels": 1})
        self.seeds.append(seed)
        await asyncio.sleep(0)
        return seed


def test_engines_wait_for_all_rows_of_a_group_that_has_begun() -> None:
    async def main() -> tuple[list[int], Any]:
        given: Any = RecordingCompletions()
        bridge, begun = Bridge(given, timeout=60.0), threading.Event()

        async def work() -> list[Any]:
            session = bridge.begin()
            begun.set()
            await asyncio.sleep(0.05)
            media: Any = {"pixels": 1}
            rows = await bridge.complete_group(torch.tensor([5]), [3, 1, 2], session, media)
            bridge.end(session)
            return rows

        beside = asyncio.create_task(run_beside(work, stalled_after=60.0, name="digits"))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        await bridge.gather()
        return list(given.seeds), await beside

    assert asyncio.run(main()) == ([3, 1, 2], [3, 1, 2])


def test_work_is_cancelled_with_what_waits_for_it() -> None:
    started, ended = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    async def main() -> None:
        task = asyncio.ensure_future(run_beside(work, stalled_after=60.0, name="digits"))
        while not started.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(main())


@pytest.mark.parametrize(("missed", "blocked"), [(9, False), (10, True)])
def test_a_loop_is_blocked_if_it_never_runs_while_the_other_does(
    monkeypatch: pytest.MonkeyPatch, missed: int, blocked: bool
) -> None:
    looks = iter([True, *[False] * missed, True, *[False] * missed])
    ended = threading.Event()

    def has_run(_: Any) -> bool:
        ran = next(looks, None)
        if ran is None:
            ended.set()
        return ran is not False

    async def work() -> str:
        while not ended.is_set():
            await asyncio.sleep(0.001)
        return "done"

    monkeypatch.setattr(LoopThread, "has_run", has_run)
    beside = run_beside(work, stalled_after=0.01, name="digits")
    if blocked:
        with pytest.raises(UserError, match=r"environment 'digits' blocks the event loop .* than 0.01 seconds"):
            asyncio.run(beside)
    else:
        assert asyncio.run(beside) == "done"
