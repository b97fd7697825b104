"""The driver's side of a refit: phases, transports and proof. No weights pass through the driver.

All engines begin a weight update, receive the weights by one transport, and finish. Then what they report is compared
with what the trainer sent (`proof`), and the tokens of probes with the trainer's scores (`probes`). Only then is the
version committed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from rlframework.base.errors import ConfigError, EngineNotReady, RefitError, UserError
from rlframework.base.logs import debug_span
from rlframework.config.sections import RefitConfig
from rlframework.interfaces.generation import GenerationEngine, Tag
from rlframework.interfaces.policy_worker import PolicyWorker, RefitState
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerGroup
from rlframework.plugins.types import Capability
from rlframework.weight_sync import ipc
from rlframework.weight_sync.buffers import group_names, sizes_of
from rlframework.weight_sync.calls import RefitCalls, RefitEngine, StartedCall
from rlframework.weight_sync.probes import Probes
from rlframework.weight_sync.proof import compare_reports, sent_by_all
from rlframework.weight_sync.receiver import EngineState, ReceivesWeights
from rlframework.workers.dispatch import InlineWorkerGroup

_LOG = logging.getLogger(__name__)

_GRACE = 10.0  # seconds for workers to answer after the deadline that they enforce themselves
_WEIGHTS: tuple[Tag, ...] = ("weights",)
_CACHE: tuple[Tag, ...] = ("kv_cache",)


class Trainer(Protocol):
    """The driver's handle on the model in training, which `rlframework.policy.client.Policy` is."""

    worker_group: WorkerGroup
    capabilities: frozenset[str]


@dataclass(frozen=True)
class RefitReport:
    """The result of a refit.

    `size`: bytes of the transferred weights, counted once. `seconds`: time from the call to the commit, without
    `start_seconds`, the longest that the software of an engine took to start in it.
    `probe_error`: the largest error of an engine's probes, None without probes. `dropped_tokens`: cached tokens of
    earlier versions that the engines dropped.
    """

    transport: str
    version: int
    size: int
    seconds: float
    probe_error: float | None = None
    dropped_tokens: int = 0
    start_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step before which the refit took place."""
        found = {"time/refit": self.seconds, "refit/mb": self.size / 2**20, "refit/version": float(self.version)}
        found["refit/dropped_tokens"] = float(self.dropped_tokens)
        if self.start_seconds:
            found["time/engine_start"] = self.start_seconds
        return found if self.probe_error is None else {**found, "refit/probe_error": self.probe_error}


@dataclass(frozen=True)
class _Round:
    """The participants of one refit, and their states before it."""

    calls: RefitCalls
    trainer: list[RefitState]
    engines: list[EngineState]

    @property
    def version(self) -> int:
        return self.trainer[0]["version"]

    @property
    def trainer_devices(self) -> set[str]:
        return {state["device"] for state in self.trainer}

    @property
    def engine_devices(self) -> set[str]:
        return {state["device"] for state in self.engines}


class Refitter:
    """Refits the generation engines from `trainer`, and keeps which version of the weights all of them have."""

    def __init__(
        self,
        trainer: Trainer,
        engines: Callable[[], Sequence[RefitEngine]],
        config: RefitConfig,
        probes: Probes | None = None,
        transport: str | None = None,
    ) -> None:
        """Send nothing yet.

        `engines()` returns those of the next refit, one of them in place of each that was lost. `probes`: None proves
        by checksums alone. `transport` overrides `config.transport`.
        """
        self._trainer, self._engines, self._config, self._probes = trainer, engines, config, probes
        self._transport = transport or config.transport
        self._version: int | None = None
        self._failure = ""
        self._joined: tuple[RefitEngine, ...] = ()  # in the trainer's process group

    @property
    def version(self) -> int | None:
        """The committed version of the weights; None before the first refit, during a refit and after a failed one."""
        return self._version

    def require_committed(self) -> int:
        """Return the committed version; raise `EngineNotReady` if there is none."""
        if self._version is None:
            reason = f"their last refit failed ({self._failure})" if self._failure else "they have no weights yet"
            raise EngineNotReady(f"the generation engines cannot serve requests: {reason}; refit them first")
        return self._version

    def is_stale(self) -> bool:
        """Return True if the trainer's weights are newer than those committed."""
        return self._version is None or self._calls(()).on_rank_0(PolicyWorker.get_refit_state)["version"] != (
            self._version
        )

    def refit(self, transport: str | None = None, buffer_bytes: float | None = None) -> RefitReport:
        """Transfer the trainer's weights to all engines, and commit their version once it is proven.

        Raises `RefitError`, naming the engine, if an engine is gone, takes too long, or does not hold or use the
        trainer's weights, and `EngineFault` if it answers a probe with what no result may be. That does not affect the
        trainer; nothing may be generated until the next refit.
        """
        begun = time.perf_counter()
        self._version, self._failure = None, "it did not finish"
        try:
            with debug_span(_LOG, "refit"):
                report = self._refit(transport, buffer_bytes)
        except Exception as error:
            self._failure = str(error)
            raise
        self._version, self._failure = report.version, ""
        return replace(report, seconds=time.perf_counter() - begun - report.start_seconds)

    def _refit(self, transport: str | None, buffer_bytes: float | None) -> RefitReport:
        calls = self._calls(tuple(self._engines()))
        _LOG.debug("refit: asking the trainer and %d engines for their state", len(calls.engines))
        states = calls.start_engines(ReceivesWeights.get_refit_state)
        now = _Round(calls, calls.on_trainer(PolicyWorker.get_refit_state), calls.of_engines(states))
        shares = ipc.share_gpu(now.trainer_devices, now.engine_devices)
        offload = shares and Capability.CPU_OFFLOAD in self._trainer.capabilities
        _LOG.debug("refit: version %s; the engines prepare for it", now.version)
        info = calls.on_rank_0(PolicyWorker.prepare_info_for_collective)
        if offload:
            calls.on_trainer(PolicyWorker.offload_before_refit)
        restored = calls.start_engines(GenerationEngine.restore, tags=_WEIGHTS)
        begun = calls.start_engines(GenerationEngine.begin_weight_update, version=now.version, specs=info)
        for each in (restored, begun):
            calls.of_engines(each)
        chosen = transport or self._resolved_transport(now)
        with debug_span(_LOG, "refit: sending the weights of version %s by %s", now.version, chosen):
            if chosen == "ipc":
                self._by_ipc(now, buffer_bytes)
            else:
                self._by_collective(now)
        _LOG.debug("refit: comparing the checksums of version %s", now.version)
        finishing = calls.start_engines(GenerationEngine.finish_weight_update)
        sent = sent_by_all(calls.on_trainer(PolicyWorker.get_sent_checksums))
        reports = calls.of_engines(finishing)
        for engine, report in zip(calls.engines, reports, strict=True):
            compare_reports(engine.name, report, now.version, info, sent)
        with debug_span(_LOG, "refit: probing the engines"):
            probed = self._probe(now, offload)
        dropped, size = sum(report.dropped_tokens for report in reports), sum(size for _, size in sizes_of(info))
        starting = max(report.start_seconds for report in reports)
        return RefitReport(chosen, now.version, size, 0.0, probed, dropped, starting)

    def _probe(self, now: _Round, offload: bool) -> float | None:
        """Let the engines serve, and probe them; on a shared GPU, trainer and caches take turns in memory."""
        calls = now.calls
        if offload:
            calls.on_trainer(PolicyWorker.offload_after_refit)
        calls.on_engines(GenerationEngine.restore, tags=_CACHE)
        if self._probes is None:
            return None
        answers = self._probes.of_version(now.version).ask(calls, self._config.deadline)
        if offload:
            calls.on_engines(GenerationEngine.release, tags=_CACHE)
        scored = calls.on_trainer(PolicyWorker.get_logprobs, data=answers.rows, positions="token_mask")
        if offload:
            calls.on_trainer(PolicyWorker.offload_after_refit)
            calls.on_engines(GenerationEngine.restore, tags=_CACHE)
        return answers.compare(scored[0]["logprobs"])

    def _calls(self, engines: tuple[RefitEngine, ...]) -> RefitCalls:
        return RefitCalls(self._trainer.worker_group, engines, self._config.deadline)

    def _resolved_transport(self, now: _Round) -> str:
        """Return `ipc` or `collective`; `auto` is resolved at first use."""
        if self._transport == "auto":
            self._transport = "ipc" if now.engine_devices <= now.trainer_devices else "collective"
        return self._transport

    # -- IPC ----------------------------------------------------------------------------------------------------------

    def _by_ipc(self, now: _Round, buffer_bytes: float | None) -> None:
        """Write into the memory that one engine per machine offers, if any; the other engines copy from it.

        Up to `ipc.BUFFERS` groups are in flight: the trainer writes one, with the next already requested, while the
        engines read another.
        """
        calls, buffers = now.calls, dict[str, ipc.ReceiveBuffer]()
        for offered in reversed(calls.on_engines(GenerationEngine.offer_refit_memory)):
            buffers |= offered
        destination: dict[str, Any] = {"receive_buffers": buffers} if buffers else {}
        if all(device.startswith(ipc.GPU_PREFIX) for device in now.engine_devices):
            destination["devices"] = sorted(now.engine_devices)
        prepared = calls.on_trainer(PolicyWorker.prepare_weights_for_ipc, **destination)
        if buffer_bytes is None and self._config.buffer_mb is not None:
            buffer_bytes = self._config.buffer_mb * 2**20
        if buffer_bytes is None:
            on_gpu = now.trainer[0]["device"].startswith(ipc.GPU_PREFIX)
            buffer_bytes = ipc.GPU_GROUP if on_gpu else ipc.OFFERED_GROUP if buffers else ipc.CPU_GROUP
        groups = group_names(prepared[0][0], min([buffer_bytes, *(free for _, free in prepared)]))
        reading: deque[list[StartedCall]] = deque()
        writing: MultiWorkerFuture | None = None
        for names in [*groups, []]:
            while names and len(reading) + (writing is not None) >= ipc.BUFFERS:  # overwrites the oldest group
                calls.of_engines(reading.popleft())
            requested = calls.start_trainer(PolicyWorker.get_weights_ipc_handles, keys=names) if names else None
            if writing is not None:
                handles: dict[str, ipc.GroupHandles] = {}
                for of_rank in calls.of_trainer(writing):
                    handles |= of_rank
                load = GenerationEngine.update_weights_from_ipc_handles
                reading.append(calls.start_engines(load, ipc_handles=handles))
            writing = requested
        while reading:
            calls.of_engines(reading.popleft())

    # -- collective ---------------------------------------------------------------------------------------------------

    def _by_collective(self, now: _Round) -> None:
        calls, engines = now.calls, tuple(now.calls.engines)
        joined = now.trainer[0]["joined"] and all(state["joined"] for state in now.engines)
        if not joined or engines != self._joined:
            self._join_process_group(now)
            self._joined = engines
        self._run_both(
            calls,
            partial(calls.start_trainer, PolicyWorker.broadcast_weights_for_collective),
            partial(calls.start_engines, GenerationEngine.update_weights_from_collective),
        )

    def _join_process_group(self, now: _Round) -> None:
        """Form one process group of the trainer, as rank 0, and all engines."""
        calls, engines = now.calls, now.calls.engines
        if isinstance(self._trainer.worker_group, InlineWorkerGroup) and any(each.in_driver for each in engines):
            raise ConfigError(
                "generation.refit.transport=collective needs the trainer and the engines in different processes: set "
                "worker_group.name or generation.workers.group to processes or ray"
            )
        _require_own_gpus(now)
        address, port = calls.on_rank_0(PolicyWorker.reserve_refit_address)
        place: dict[str, Any] = {"ip": address, "port": port, "world_size": 1 + len(engines)}
        join = GenerationEngine.init_collective

        def start_engines() -> list[StartedCall]:
            ranks = enumerate(engines, 1)
            return [call for rank, each in ranks for call in calls.of([each]).start_engines(join, **place, rank=rank)]

        self._run_both(calls, partial(calls.start_trainer, PolicyWorker.init_collective, **place), start_engines)

    def _run_both(
        self,
        calls: RefitCalls,
        start_trainer: Callable[[], MultiWorkerFuture],
        start_engines: Callable[[], list[StartedCall]],
    ) -> None:
        """Start a call on both sides, the one in this process last if there is one, and wait for both."""
        in_driver = any(engine.in_driver for engine in calls.engines)
        started = [] if in_driver else start_engines()
        sending = start_trainer()
        started = start_engines() if in_driver else started
        failed: RefitError | UserError | None = None
        try:
            calls.of_trainer(sending)
        except (RefitError, UserError) as error:
            failed = error
        try:
            calls.of_engines(started, _GRACE)
        except RefitError:  # closer to the cause, unless the trainer did not send at all
            if not isinstance(failed, UserError):
                raise
        if failed is not None:
            raise failed


def _require_own_gpus(now: _Round) -> None:
    """Raise a `ConfigError` if two processes of the group share a GPU, which NCCL rejects."""
    devices = Counter([now.trainer[0]["device"], *(state["device"] for state in now.engines)])
    if shared := [name for name, count in devices.items() if count > 1 and name.startswith(ipc.GPU_PREFIX)]:
        raise ConfigError(
            f"generation.refit.transport=collective gives NCCL two processes on the GPU {shared[0]}, which it does "
            "not support: place the engines on GPUs of their own (generation.workers.group=ray), or use at most as "
            "many engines as the trainer has workers, so that generation.refit.transport=ipc can be used"
        )
