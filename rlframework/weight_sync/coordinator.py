"""The driver's side of a refit: `Refitter` moves the trainer's weights to the generation engines, by either transport.

The driver asks for one group of weights after the other (IPC), or has both sides begin and waits (collective). Nothing
of the weights passes through it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlframework.errors import ConfigError, DeadlineExceeded, RefitError, RLFrameworkError
from rlframework.weight_sync.buffers import group_names
from rlframework.weight_sync.memory_budget import BUFFERS, CPU_GROUP, GPU_GROUP, OFFERED_GROUP
from rlframework.workers.inline import InlineWorkerGroup

if TYPE_CHECKING:
    from rlframework.config.sections import RefitConfig
    from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerGroup

_AHEAD = 1
"""Groups that the trainer is asked for while it writes another, so that it does not wait for the driver."""

_GRACE = 10.0
"""Seconds that workers have to answer after the deadline that they keep themselves."""


@dataclass(frozen=True)
class RefitReport:
    """What a refit did: bytes of all weights as they were sent (once), and seconds."""

    transport: str
    size: int
    seconds: float
    groups: int


class Refitter:
    """Refits the workers of `generation` from those of `trainer`."""

    def __init__(
        self, trainer: WorkerGroup, generation: WorkerGroup, config: RefitConfig, transport: str | None = None
    ) -> None:
        """Nothing is sent before the first call. `transport`: in place of `config.transport`."""
        self._trainer, self._generation, self._config = trainer, generation, config
        self._transport = transport or config.transport
        self._info: Mapping[str, Any] | None = None
        self._version: int | None = None

    @property
    def transport(self) -> str:
        """`ipc` or `collective`; `auto` is decided when it is first asked for."""
        if self._transport == "auto":
            there = {state["device"] for state in self._all(self._trainer, "get_refit_state")}
            wanted = {state["device"] for state in self._all(self._generation, "get_refit_state")}
            self._transport = "ipc" if wanted <= there else "collective"
        return self._transport

    def is_stale(self) -> bool:
        """Whether the trainer has other weights than those that the engines were given last."""
        return self._version is None or self._state()["version"] != self._version

    def refit(self, transport: str | None = None, buffer_bytes: float | None = None) -> RefitReport:
        """Bring the trainer's weights to the engines.

        A `RefitError` where they did not arrive as they are, a `WorkerLost` where an engine is gone, a
        `DeadlineExceeded` where one takes too long. The trainer is as it was in all three cases; engines that are left
        refuse to generate until the next refit.
        """
        begun = time.perf_counter()
        self._version, version = None, self._state()["version"]
        info = self._one(self._trainer, "prepare_info_for_collective")
        if info != self._info:
            self._all(self._generation, "prepare_refit_info", state_dict_info=info)
            self._info = info
        chosen = transport or self.transport
        size, groups = self._by_ipc(buffer_bytes) if chosen == "ipc" else self._by_collective()
        self._all(self._generation, "require_weights")
        self._version = version
        return RefitReport(chosen, size, time.perf_counter() - begun, groups)

    # -- IPC ----------------------------------------------------------------------------------------------------------

    def _by_ipc(self, buffer_bytes: float | None) -> tuple[int, int]:
        """Straight into the memory of one engine on each machine, which others copy from, where there is such memory.

        As many groups as there are buffers are on their way: the trainer writes one and knows the next, while the
        engines read.
        """
        rooms: dict[str, Any] = {}
        for offered in reversed(self._all(self._generation, "offer_refit_memory")):
            rooms |= offered
        prepared = self._all(self._trainer, "prepare_weights_for_ipc", **({"rooms": rooms} if rooms else {}))
        sizes = prepared[0][0]
        wanted = self._budget(OFFERED_GROUP if rooms else CPU_GROUP) if buffer_bytes is None else buffer_bytes
        budget = min([free for _, free in prepared] + [wanted])
        groups = group_names(sizes, budget)
        asked: deque[MultiWorkerFuture] = deque()
        reading: deque[MultiWorkerFuture] = deque()
        for number, names in enumerate(groups, 1):
            while len(asked) + len(reading) >= BUFFERS:  # this group is written over the one that is waited for
                self._read(reading.popleft())
            asked.append(self._begin(self._trainer, "get_weights_ipc_handles", keys=names))
            while len(asked) > (_AHEAD if number < len(groups) else 0):
                handles = self._written(asked.popleft())
                reading.append(self._begin(self._generation, "update_weights_from_ipc_handles", ipc_handles=handles))
        while reading:
            self._read(reading.popleft())
        return sum(size for _, size in sizes), len(groups)

    def _written(self, future: MultiWorkerFuture) -> dict[str, Any]:
        """Wait until the trainer has written a group; its handles on each device."""
        handles: dict[str, Any] = {}
        for one in self._results(self._trainer, future):
            handles |= one
        return handles

    def _budget(self, on_cpu: float = CPU_GROUP) -> float:
        """As the configuration says, or what suits the device that the transport reaches."""
        if self._config.buffer_mb is not None:
            return self._config.buffer_mb * 2**20
        return GPU_GROUP if str(self._state()["device"]).startswith("GPU") else on_cpu

    def _read(self, future: MultiWorkerFuture) -> None:
        """Wait until the engines have read a group."""
        if not all(self._results(self._generation, future)):
            raise RefitError("a generation engine did not take the weights that it was given")

    # -- collective ---------------------------------------------------------------------------------------------------

    def _by_collective(self) -> tuple[int, int]:
        states = [self._state(), *self._all(self._generation, "get_refit_state")]
        if not all(state["joined"] for state in states):
            self._join()
        self._together("broadcast_weights_for_collective", {}, "update_weights_from_collective", {})
        assert self._info is not None
        from rlframework.weight_sync.buffers import bytes_of

        sizes = [(name, bytes_of(*spec)) for name, spec in self._info.items()]
        return sum(size for _, size in sizes), len(group_names(sizes, self._budget()))

    def _join(self) -> None:
        if isinstance(self._trainer, InlineWorkerGroup) and isinstance(self._generation, InlineWorkerGroup):
            raise ConfigError(
                "generation.refit.transport=collective needs the trainer and the engines in different processes: set "
                "worker_group.name or generation.workers.group to processes or ray"
            )
        address, port = self._one(self._trainer, "reserve_refit_address")
        meeting = {"ip": address, "port": port, "world_size": 1 + self._generation.sharding.size}
        self._together("init_collective", meeting, "init_collective", meeting)

    def _together(self, sends: str, sent: Mapping[str, Any], receives: str, received: Mapping[str, Any]) -> None:
        """Have both sides begin before either is waited for; whoever is in this process begins last."""
        sides = [(self._generation, receives, received), (self._trainer, sends, sent)]
        if isinstance(self._generation, InlineWorkerGroup):
            sides.reverse()
        futures = {id(group): self._begin(group, method, **arguments) for group, method, arguments in sides}
        failed: RLFrameworkError | None = None
        try:
            self._results(self._trainer, futures[id(self._trainer)])
        except RefitError as error:  # what the engines say is nearer to the cause
            failed = error
        except RLFrameworkError:
            with suppress(RLFrameworkError):
                self._results(self._generation, futures[id(self._generation)], self._config.deadline + _GRACE)
            raise
        try:
            self._results(self._generation, futures[id(self._generation)], self._config.deadline + _GRACE)
        except RLFrameworkError as error:
            raise error from failed
        if failed is not None:
            raise failed

    # -- calls --------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._one(self._trainer, "get_refit_state")
        return state

    def _begin(self, group: WorkerGroup, method: str, **arguments: Any) -> MultiWorkerFuture:
        return group.run_all_workers_single_data("attempt", method=method, arguments=arguments)

    def _all(self, group: WorkerGroup, method: str, **arguments: Any) -> list[Any]:
        return self._results(group, self._begin(group, method, **arguments))

    def _one(self, group: WorkerGroup, method: str) -> Any:
        future = group.run_single_worker_single_data("attempt", 0, method=method, arguments={})
        return self._results(group, future)[0]

    def _results(self, group: WorkerGroup, future: MultiWorkerFuture, deadline: float | None = None) -> list[Any]:
        """Of the engines within `deadline` seconds, by default that of the refit; of the trainer within its own."""
        if group is self._generation and deadline is None:
            deadline = self._config.deadline
        future.deadline = deadline
        try:
            answers = group.get_all_worker_results(future)
        except DeadlineExceeded as error:
            if deadline is None:
                raise
            raise DeadlineExceeded(
                f"a generation engine did not take the weights of a refit within {deadline:g} s "
                f"(generation.refit.deadline is {self._config.deadline:g}): {error}"
            ) from error
        if told := [text for _, text in answers if text]:
            raise RefitError("; ".join(told))
        return [result for result, _ in answers]
