"""Several coroutines at once, of which none outlives the others' error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

R = TypeVar("R")


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
