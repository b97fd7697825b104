"""The worker of `WorkerGroupSuite`: identifies itself, returns its arguments, and fails, dies or hangs on request.

Worker processes import this module by name, so it is light and does not import torch.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlframework.base.errors import BatchError
from rlframework.interfaces.worker_group import WorkerContext


class ProbeWorker:
    """Writes its process id into `folder`, so that a test finds its processes even if the start fails.

    The constructor raises on rank `fail_rank` and takes `slow_seconds` on rank `slow_rank`.
    """

    def __init__(
        self,
        context: WorkerContext,
        folder: str,
        word: str = "",
        fail_rank: int | None = None,
        slow_rank: int | None = None,
        slow_seconds: float = 0.0,
    ) -> None:
        self._context = context
        self._folder = Path(folder)
        self._word = word
        self._calls: list[str] = []
        (self._folder / f"pid-{os.getpid()}").touch()
        if context.rank == slow_rank:
            time.sleep(slow_seconds)
        if context.rank == fail_rank:
            raise ValueError(f"cannot build a worker of {word}")

    def who(self) -> dict[str, Any]:
        """Return the context, the process id and the constructor's argument."""
        context = self._context
        return {
            "rank": context.rank,
            "world_size": context.world_size,
            "device": context.device,
            "address": (context.master_addr, context.master_port),
            "word": self._word,
            "pid": os.getpid(),
        }

    def echo(self, **given: Any) -> tuple[int, dict[str, Any]]:
        """Return the rank and the arguments."""
        self._calls.append("echo")
        return self._context.rank, given

    def calls(self) -> list[str]:
        """Return the recorded calls of `echo`."""
        return self._calls

    def forget(self) -> None:
        """Clear the recorded calls before the next test."""
        self._calls.clear()

    def give_back(self, value: Any) -> Any:
        """Return the argument."""
        return value

    def apply(self, function: Callable[[int], int], value: int) -> int:
        """Return `function(value)`."""
        return function(value)

    def spoil(self, numbers: list[int], tensor: Any) -> int:
        """Modify the arguments in place."""
        numbers.append(len(numbers))
        tensor.zero_()
        return self._context.rank

    def spoil_in_turn(self, tensor: Any) -> float:
        """Wait for the ranks before this one, return the sum of the argument, and set it to 0."""
        time.sleep(0.3 * self._context.rank)
        total = float(tensor.double().sum())
        tensor.zero_()
        return total

    def sleep(self, seconds: Sequence[float]) -> int:
        """Sleep `seconds[rank]` seconds."""
        time.sleep(seconds[self._context.rank])
        return self._context.rank

    def wait_for_notice(self, seconds: float) -> bool:
        """Wait for a notice of the driver, at most `seconds`; return whether there was one."""
        until = time.monotonic() + seconds
        while not (noticed := self._context.notified()) and time.monotonic() < until:
            time.sleep(0.01)
        return noticed

    def fail(self, rank: int, others_take: float = 0.0) -> None:
        """Raise an error on `rank`, while the others are busy for a while."""
        if self._context.rank != rank:
            time.sleep(others_take)
        else:
            self._raise_from_here()

    def _raise_from_here(self) -> None:
        raise RuntimeError(f"a bolt is loose on rank {self._context.rank}")

    def refuse(self) -> None:
        """Raise an rlframework error caused by the user."""
        raise BatchError("the batch has 3 rows, which cannot be divided by 2")

    def die(self, rank: int, others_take: float = 0.0) -> None:
        """Kill the process of `rank`, while the others are busy for a while."""
        if self._context.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(others_take)

    def answer_with_a_lock(self) -> Any:
        """Return an object that cannot be pickled."""
        return threading.Lock()

    def clean_up(self) -> None:
        """Clean up, adding one line per call to a file of this rank."""
        with (self._folder / f"cleanup-{self._context.rank}").open("a") as file:
            file.write("cleaned\n")

    def fail_to_clean_up(self) -> None:
        """Raise in a cleanup."""
        raise RuntimeError("the cleanup failed")

    def clean_up_slowly(self) -> None:
        """Take fifteen seconds to clean up."""
        time.sleep(15.0)
