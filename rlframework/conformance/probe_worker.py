"""The worker that `WorkerGroupSuite` starts: tells who it is, gives back what it got, fails, dies or hangs when told.

Worker processes import this module by name, so it is light: torch is imported by nobody here.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlframework.errors import BatchError
from rlframework.interfaces.worker_group import WorkerContext


class ProbeWorker:
    """Writes its process id into `folder`, so that a test knows its processes even where a start fails.

    Rank `fail_rank` cannot be made, `slow_rank` takes `slow_seconds` for it.
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
            raise ValueError(f"no worker can be made of {word}")

    def who(self) -> dict[str, Any]:
        """Its context, its process and its constructor's argument."""
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
        """Its rank and what it was given."""
        self._calls.append("echo")
        return self._context.rank, given

    def calls(self) -> list[str]:
        """The calls that reached it, so far as they are noted: `echo`."""
        return self._calls

    def forget(self) -> None:
        """Let the next test find no calls."""
        self._calls.clear()

    def give_back(self, value: Any) -> Any:
        """What it was given."""
        return value

    def spoil(self, numbers: list[int], tensor: Any) -> int:
        """Change what it was given, in place."""
        numbers.append(len(numbers))
        tensor.zero_()
        return self._context.rank

    def spoil_in_turn(self, tensor: Any) -> float:
        """Wait until the ranks before it are done; then the sum of what it was given, and all of that set to 0."""
        time.sleep(0.3 * self._context.rank)
        total = float(tensor.double().sum())
        tensor.zero_()
        return total

    def sleep(self, seconds: Sequence[float]) -> int:
        """Rank i takes `seconds[i]`."""
        time.sleep(seconds[self._context.rank])
        return self._context.rank

    def fail(self, rank: int, others_take: float = 0.0) -> None:
        """`rank` raises an error of its own kind; the others are busy for a while."""
        if self._context.rank != rank:
            time.sleep(others_take)
        else:
            self._raise_from_here()

    def _raise_from_here(self) -> None:
        raise RuntimeError(f"a nut is loose on rank {self._context.rank}")

    def refuse(self) -> None:
        """An error of rlframework's, which is the caller's fault."""
        raise BatchError("the batch has 3 rows, which do not go into 2")

    def die(self, rank: int, others_take: float = 0.0) -> None:
        """The process of `rank` is killed; the others are busy for a while."""
        if self._context.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(others_take)

    def answer_with_a_lock(self) -> Any:
        """Something that no process can send to another."""
        return threading.Lock()

    def tidy_up(self) -> None:
        """A clean-up that leaves a line a call in a file of its rank."""
        with (self._folder / f"tidy-{self._context.rank}").open("a") as file:
            file.write("tidied\n")

    def fail_to_tidy_up(self) -> None:
        """A clean-up that raises."""
        raise RuntimeError("the cupboard is locked")

    def tidy_up_slowly(self) -> None:
        """A clean-up that takes four seconds."""
        time.sleep(4.0)
