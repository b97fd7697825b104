"""The driver's side of a refit: `Refitter` transfers the trainer's weights to the engines, by either transport.

The driver requests one group of weights at a time (IPC), or starts both sides and waits (collective). No weights pass
through the driver.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from rlframework.errors import ConfigError, DeadlineExceeded, RefitError, RLFrameworkError
from rlframework.interfaces.policy_worker import PolicyWorker, RefitState
from rlframework.weight_sync.buffers import WeightInfo, group_names, sizes_of
from rlframework.weight_sync.ipc import (
    BUFFERS,
    CPU_GROUP,
    GPU_GROUP,
    GPU_PREFIX,
    OFFERED_GROUP,
    GroupHandles,
    ReceiveBuffer,
)
from rlframework.weight_sync.receiver import ReceivesWeights
from rlframework.workers.inline import InlineWorkerGroup

if TYPE_CHECKING:
    from rlframework.config.sections import RefitConfig
    from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerGroup

P = ParamSpec("P")
R = TypeVar("R")
_AHEAD = 1
"""Groups requested from the trainer while it writes another, so it does not wait for the driver."""

_GRACE = 10.0
"""Seconds for workers to answer after the deadline that they enforce themselves."""

_UNKNOWN_DEVICE = ""
"""The device reported by an engine that does not derive from `ReceivesWeights`."""


def attempt(worker: object, name: str, method: str, arguments: Mapping[str, Any]) -> tuple[Any, str]:
    """Call `method` of `worker`; return its result and `""`, or None and the `RefitError` it raised, after `name`.

    An exception would end the whole worker group, but a failed refit can be repeated.
    """
    try:
        return getattr(worker, method)(**arguments), ""
    except RefitError as error:
        return None, f"{name}: {error}"


@dataclass(frozen=True)
class RefitReport:
    """The result of a refit: the transferred weights' total size in bytes, counted once, and the time in seconds."""

    transport: str
    size: int
    seconds: float


class Refitter:
    """Refits the workers of `generation` from those of `trainer`."""

    def __init__(
        self, trainer: WorkerGroup, generation: WorkerGroup, config: RefitConfig, transport: str | None = None
    ) -> None:
        """Send nothing yet. `transport` overrides `config.transport`."""
        self._trainer, self._generation, self._config = trainer, generation, config
        self._transport = transport or config.transport
        self._info: WeightInfo | None = None
        self._version: int | None = None

    @property
    def transport(self) -> str:
        """`ipc` or `collective`; `auto` is resolved at first use."""
        if self._transport == "auto":
            trainer, engines = self._devices
            self._transport = "ipc" if engines <= trainer else "collective"
        return self._transport

    @cached_property
    def shares_gpu(self) -> bool:
        """Whether an engine runs on a GPU of the trainer, or may, because its device is unknown."""
        trainer, engines = self._devices
        shared = trainer if _UNKNOWN_DEVICE in engines else trainer & engines
        return any(device.startswith(GPU_PREFIX) for device in shared)

    @cached_property
    def _devices(self) -> tuple[set[str], set[str]]:
        """The devices of the trainer's workers and of the engines, as `ipc.device_id` names them."""
        trainer = {state["device"] for state in self._call_all(self._trainer, PolicyWorker.get_refit_state)}
        return trainer, {state["device"] for state in self._call_all(self._generation, ReceivesWeights.get_refit_state)}

    def is_stale(self) -> bool:
        """Return True if the trainer's weights are newer than those last sent to the engines."""
        return self._version is None or self._trainer_state()["version"] != self._version

    def refit(self, transport: str | None = None, buffer_bytes: float | None = None) -> RefitReport:
        """Transfer the trainer's weights to all engines.

        Raises `RefitError` if weights are corrupted or missing, `WorkerLost` if an engine is gone and
        `DeadlineExceeded` if one takes too long. None of these affects the trainer; the remaining engines refuse to
        generate until the next refit.
        """
        start = time.perf_counter()
        self._version, version = None, self._trainer_state()["version"]
        info: WeightInfo = self._call_trainer(PolicyWorker.prepare_info_for_collective)
        if info != self._info:
            self._call_all(self._generation, ReceivesWeights.prepare_refit_info, state_dict_info=info)
            self._info = info
        chosen = transport or self.transport
        if chosen == "ipc":
            self._by_ipc(buffer_bytes)
        else:
            self._by_collective()
        self._call_all(self._generation, ReceivesWeights.require_weights)
        self._version = version
        return RefitReport(chosen, sum(size for _, size in sizes_of(info)), time.perf_counter() - start)

    # -- IPC ----------------------------------------------------------------------------------------------------------

    def _by_ipc(self, buffer_bytes: float | None) -> None:
        """Write into the memory that one engine per machine offers, if any; the other engines copy from it.

        Up to `BUFFERS` groups are in flight: the trainer writes one, with the next already requested, while the engines
        read another.
        """
        buffers: dict[str, ReceiveBuffer] = {}
        for offered in reversed(self._call_all(self._generation, ReceivesWeights.offer_refit_memory)):
            buffers |= offered
        destination = {"receive_buffers": buffers} if buffers else {}
        prepared = self._call_all(self._trainer, PolicyWorker.prepare_weights_for_ipc, **destination)
        if buffer_bytes is None and self._config.buffer_mb is not None:
            buffer_bytes = self._config.buffer_mb * 2**20
        if buffer_bytes is None:
            on_gpu = self._trainer_state()["device"].startswith(GPU_PREFIX)
            buffer_bytes = GPU_GROUP if on_gpu else OFFERED_GROUP if buffers else CPU_GROUP
        groups = group_names(prepared[0][0], min([buffer_bytes, *(free for _, free in prepared)]))
        requested: deque[MultiWorkerFuture] = deque()
        reading: deque[MultiWorkerFuture] = deque()
        for number, names in enumerate(groups, 1):
            while len(requested) + len(reading) >= BUFFERS:  # this group overwrites the one being waited for
                self._wait_until_read(reading.popleft())
            requested.append(self._start(self._trainer, PolicyWorker.get_weights_ipc_handles, keys=names))
            while len(requested) > (_AHEAD if number < len(groups) else 0):
                ranks = self._results(self._trainer, requested.popleft())
                handles: dict[str, GroupHandles] = {
                    device: group for of_rank in ranks for device, group in of_rank.items()
                }
                reading.append(
                    self._start(self._generation, ReceivesWeights.update_weights_from_ipc_handles, ipc_handles=handles)
                )
        while reading:
            self._wait_until_read(reading.popleft())

    def _wait_until_read(self, future: MultiWorkerFuture) -> None:
        """Wait until the engines have read a group."""
        if not all(self._results(self._generation, future)):
            raise RefitError("a generation engine did not load the weights that it was sent")

    # -- collective ---------------------------------------------------------------------------------------------------

    def _by_collective(self) -> None:
        engines = self._call_all(self._generation, ReceivesWeights.get_refit_state)
        if not (self._trainer_state()["joined"] and all(engine["joined"] for engine in engines)):
            self._join_process_group()
        self._run_both(PolicyWorker.broadcast_weights_for_collective, ReceivesWeights.update_weights_from_collective)

    def _join_process_group(self) -> None:
        if isinstance(self._trainer, InlineWorkerGroup) and isinstance(self._generation, InlineWorkerGroup):
            raise ConfigError(
                "generation.refit.transport=collective needs the trainer and the engines in different processes: set "
                "worker_group.name or generation.workers.group to processes or ray"
            )
        address, port = self._call_trainer(PolicyWorker.reserve_refit_address)
        size = 1 + self._generation.sharding.size
        self._run_both(
            PolicyWorker.init_collective, ReceivesWeights.init_collective, ip=address, port=port, world_size=size
        )

    def _run_both(
        self, trainer_method: Callable[..., None], engine_method: Callable[..., Any], **arguments: Any
    ) -> None:
        """Start a call on both sides, the one in this process last if there is one, and wait for both."""
        sides = [(self._generation, engine_method), (self._trainer, trainer_method)]
        if isinstance(self._generation, InlineWorkerGroup):
            sides.reverse()
        futures = {id(group): self._start(group, method, **arguments) for group, method in sides}
        failed: RLFrameworkError | None = None
        try:
            self._results(self._trainer, futures[id(self._trainer)])
        except RefitError as error:  # the engines' errors are closer to the cause
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

    def _trainer_state(self) -> RefitState:
        return self._call_trainer(PolicyWorker.get_refit_state)

    def _start(
        self, group: WorkerGroup, method: Callable[Concatenate[Any, P], Any], *args: P.args, **arguments: P.kwargs
    ) -> MultiWorkerFuture:
        run: Any = group.run_all_workers_single_data  # rejects positional arguments
        future: MultiWorkerFuture = run("attempt", *args, method=method.__name__, arguments=arguments)
        return future

    def _call_all(
        self, group: WorkerGroup, method: Callable[Concatenate[Any, P], R], *args: P.args, **arguments: P.kwargs
    ) -> list[R]:
        return self._results(group, self._start(group, method, *args, **arguments))

    def _call_trainer(self, method: Callable[[Any], R]) -> R:
        future = self._trainer.run_single_worker_single_data("attempt", 0, method=method.__name__, arguments={})
        result: R = self._results(self._trainer, future)[0]
        return result

    def _results(self, group: WorkerGroup, future: MultiWorkerFuture, deadline: float | None = None) -> list[Any]:
        """Wait for the engines up to `deadline` seconds, by default the refit's; for the trainer, its own deadline."""
        if group is self._generation and deadline is None:
            deadline = self._config.deadline
        future.deadline = deadline
        try:
            answers = group.get_all_worker_results(future)
        except DeadlineExceeded as error:
            if deadline is None:
                raise
            raise DeadlineExceeded(
                f"a generation engine did not finish its part of a refit within {deadline:g} s "
                f"(generation.refit.deadline is {self._config.deadline:g}): {error}"
            ) from error
        if errors := [error for _, error in answers if error]:
            raise RefitError("; ".join(errors))
        return [result for result, _ in answers]
