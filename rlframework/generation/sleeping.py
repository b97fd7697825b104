"""Engines whose software can free its memory on a GPU, and allocate it again."""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import Protocol

import torch

from rlframework.generation.serving import S, ServingEngine
from rlframework.interfaces.generation import Tag


class Sleeper(Protocol):
    """Software that serves requests."""

    def sleep(self, *, weights: bool) -> None:
        """Free the cache and, with `weights`, the weights. It serves no requests now."""

    def wake(self, tags: Collection[str]) -> None:
        """Allocate again what `sleep` freed."""


class SleepingEngine(ServingEngine[S]):
    """Implements `release` and `restore` on a GPU. On a CPU nothing is freed.

    `_started` is the software; None: it has not started.
    """

    _started: Sleeper | None = None
    _asleep: Set[Tag] = frozenset()

    def release(self, tags: Collection[Tag] = ("weights", "kv_cache")) -> int:
        """See `GenerationEngine.release`. The cache goes with the weights.

        Unfinished requests lose their caches and begin again, with the same samples unless the weights change.
        """
        if self.refit_device.type == "cpu" or self._started is None or self._asleep >= set(tags):
            return 0
        self.begin_again()
        before, weights_too = self._free(), "weights" in tags
        self._started.sleep(weights=weights_too)
        self._asleep = {"weights", "kv_cache"} if weights_too else {"kv_cache"}
        if weights_too:
            self.weight_state.fail("its weights were released")
        return self._free() - before

    def restore(self, tags: Collection[Tag] = ("weights", "kv_cache")) -> int:
        """See `GenerationEngine.restore`."""
        asleep = self._asleep & set(tags)
        if self._started is None or not asleep:
            return 0
        before = self._free()
        self._started.wake(asleep)
        self._asleep -= asleep
        return before - self._free()

    def _free(self) -> int:
        return int(torch.cuda.mem_get_info(self.refit_device)[0])
