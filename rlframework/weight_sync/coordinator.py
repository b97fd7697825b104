"""The driver's side of a refit, by either transport. No weights pass through the driver."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlframework.config.sections import RefitConfig
from rlframework.errors import ConfigError, DeadlineExceeded, RefitError, RLFrameworkError
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerGroup
from rlframework.weight_sync import ipc
from rlframework.weight_sync.buffers import WeightInfo, group_names, sizes_of
from rlframework.weight_sync.receiver import ReceivesWeights
from rlframework.workers.inline import InlineWorkerGroup

P = ParamSpec("P")
R = TypeVar("R")
_GRACE = 10.0  # seconds for workers to answer after the deadline that they enforce themselves


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
        shared = trainer if "" in engines else trainer & engines
        return any(device.startswith(ipc.GPU_PREFIX) for device in shared)

    @cached_property
    def _devices(self) -> tuple[set[str], set[str]]:
        """The devices of the trainer's workers and of the engines, as `ipc.device_id` names them."""
        trainer = self._call_all(self._trainer, PolicyWorker.get_refit_state)
        engines = self._call_all(self._generation, ReceivesWeights.get_refit_state)
        return {state["device"] for state in trainer}, {state["device"] for state in engines}

    def is_stale(self) -> bool:
        """Return True if the trainer's weights are newer than those last sent to the engines."""
        return self._version is None or self._call_trainer(PolicyWorker.get_refit_state)["version"] != self._version

    def refit(self, transport: str | None = None, buffer_bytes: float | None = None) -> RefitReport:
        """Transfer the trainer's weights to all engines.

        Raises `RefitError` if weights are corrupted or missing, `WorkerLost` if an engine is gone and
        `DeadlineExceeded` if one takes too long. None of these affects the trainer; the remaining engines refuse to
        generate until the next refit.
        """
        start = time.perf_counter()
        self._version, version = None, self._call_trainer(PolicyWorker.get_refit_state)["version"]
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

        Up to `ipc.BUFFERS` groups are in flight: the trainer writes one, with the next already requested, while the
        engines read another.
        """
        buffers: dict[str, ipc.ReceiveBuffer] = {}
        for offered in reversed(self._call_all(self._generation, ReceivesWeights.offer_refit_memory)):
            buffers |= offered
        destination: dict[str, Any] = {"receive_buffers": buffers} if buffers else {}
        _, engines = self._devices
        if all(device.startswith(ipc.GPU_PREFIX) for device in engines):
            destination["devices"] = sorted(engines)
        prepared = self._call_all(self._trainer, PolicyWorker.prepare_weights_for_ipc, **destination)
        if buffer_bytes is None and self._config.buffer_mb is not None:
            buffer_bytes = self._config.buffer_mb * 2**20
        if buffer_bytes is None:
            on_gpu = self._call_trainer(PolicyWorker.get_refit_state)["device"].startswith(ipc.GPU_PREFIX)
            buffer_bytes = ipc.GPU_GROUP if on_gpu else ipc.OFFERED_GROUP if buffers else ipc.CPU_GROUP
        groups = group_names(prepared[0][0], min([buffer_bytes, *(free for _, free in prepared)]))
        reading: deque[MultiWorkerFuture] = deque()
        writing: MultiWorkerFuture | None = None
        for names in [*groups, []]:
            while names and len(reading) + (writing is not None) >= ipc.BUFFERS:  # overwrites the oldest group
                self._wait_until_read(reading.popleft())
            write = PolicyWorker.get_weights_ipc_handles
            requested = self._start(self._trainer, write, keys=names) if names else None
            if writing is not None:
                handles: dict[str, ipc.GroupHandles] = {}
                for of_rank in self._results(self._trainer, writing):
                    handles |= of_rank
                load = ReceivesWeights.update_weights_from_ipc_handles
                reading.append(self._start(self._generation, load, ipc_handles=handles))
            writing = requested
        while reading:
            self._wait_until_read(reading.popleft())

    def _wait_until_read(self, future: MultiWorkerFuture) -> None:
        if not all(self._results(self._generation, future)):
            raise RefitError("a generation engine did not load the weights that it was sent")

    # -- collective ---------------------------------------------------------------------------------------------------

    def _by_collective(self) -> None:
        trainer = self._call_trainer(PolicyWorker.get_refit_state)
        engines = self._call_all(self._generation, ReceivesWeights.get_refit_state)
        if not (trainer["joined"] and all(engine["joined"] for engine in engines)):
            self._join_process_group()
        self._run_both(PolicyWorker.broadcast_weights_for_collective, ReceivesWeights.update_weights_from_collective)

    def _join_process_group(self) -> None:
        if isinstance(self._trainer, InlineWorkerGroup) and isinstance(self._generation, InlineWorkerGroup):
            raise ConfigError(
                "generation.refit.transport=collective needs the trainer and the engines in different processes: set "
                "worker_group.name or generation.workers.group to processes or ray"
            )
        self._require_own_gpus(self._call_trainer(PolicyWorker.get_refit_state)["device"])
        address, port = self._call_trainer(PolicyWorker.reserve_refit_address)
        size = 1 + self._generation.sharding.size
        self._run_both(
            PolicyWorker.init_collective, ReceivesWeights.init_collective, ip=address, port=port, world_size=size
        )

    def _require_own_gpus(self, sender: str) -> None:
        """Raise a `ConfigError` if two processes of the group share a GPU, which NCCL rejects."""
        engines = self._call_all(self._generation, ReceivesWeights.get_refit_state)
        devices = Counter([sender, *(state["device"] for state in engines)])
        if shared := [name for name, count in devices.items() if count > 1 and name.startswith(ipc.GPU_PREFIX)]:
            raise ConfigError(
                f"generation.refit.transport=collective gives NCCL two processes on the GPU {shared[0]}, which it does "
                "not support: place the engines on GPUs of their own (generation.workers.group=ray), or use at most as "
                "many engines as the trainer has workers, so that generation.refit.transport=ipc can be used"
            )

    def _run_both(
        self, trainer_method: Callable[..., None], engine_method: Callable[..., Any], **arguments: Any
    ) -> None:
        """Start a call on both sides, the one in this process last if there is one, and wait for both."""
        sides = [(self._generation, engine_method), (self._trainer, trainer_method)]
        if isinstance(self._generation, InlineWorkerGroup):
            sides.reverse()
        futures = {id(group): self._start(group, method, **arguments) for group, method in sides}
        errors: list[RLFrameworkError] = []
        for group, deadline in ((self._trainer, None), (self._generation, self._config.deadline + _GRACE)):
            try:
                self._results(group, futures[id(group)], deadline)
            except RLFrameworkError as error:
                errors.append(error)
        if errors:  # the engines' errors are closer to the cause than a `RefitError` of the trainer
            raise errors[-1] if isinstance(errors[0], RefitError) else errors[0]

    # -- calls --------------------------------------------------------------------------------------------------------

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
        """Wait for the engines up to `deadline` seconds, by default the refit's; the trainer has its own deadline."""
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
