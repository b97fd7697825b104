"""Software of an engine that acts on its whole process: on torch's global state, process groups and a GPU's memory."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Set
from contextlib import contextmanager
from typing import Protocol

import torch

from rlframework.base.errors import ConfigError
from rlframework.generation.serving import S, ServingEngine
from rlframework.interfaces.generation import Tag


@contextmanager
def torch_restored() -> Iterator[None]:
    """Restore the random state, the number of threads, and `torch.set_num_threads`; hide warnings of future changes."""
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about its own names
        try:
            yield
        finally:
            torch.set_num_threads = set_threads
            torch.set_num_threads(threads)


def require_own_process(engine: str) -> None:
    """Raise `ConfigError` if this process has a process group, such as that of another engine.

    `engine`: the name of the software.
    """
    if torch.distributed.is_initialized():
        raise ConfigError(
            f"{engine} needs a process of its own, and this one has a process group already: close the other engine, "
            "or set generation.workers.group to processes or ray"
        )


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
