"""Generation on workers of its own (`generation.workers`), with refits of their weights.

The workers are worker groups like the trainer's, one for each engine, on this machine or on a cluster. With `ray`,
they may use another Python environment. A refit updates their weights before a rollout that would otherwise use stale
ones. An engine that was lost is replaced beside the run: another one starts while the others go on, and gets the
weights of the next refit after its start, before its first request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from rlframework.base.errors import RefitError
from rlframework.config.sections import RunConfig
from rlframework.generation.driver import Generation, run_in_loop
from rlframework.generation.engine_handle import EngineHandle, RemoteEngine
from rlframework.generation.engine_starter import EngineStarter
from rlframework.generation.result_contract import ResultContract
from rlframework.huggingface.model_directories import read_config
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.models.rotary import regime_limits
from rlframework.observers.timeline import REFITS
from rlframework.plugins.types import Capability, GenerationEngineRecord
from rlframework.weight_sync.coordinator import RefitReport, Refitter
from rlframework.weight_sync.ipc import share_gpu
from rlframework.weight_sync.probes import PROBE_HEADROOM, Probes
from rlframework.weight_sync.proof import NoiseBound
from rlframework.workers.remote_calls import WorkerCalls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.plugins.manager import PluginManager
    from rlframework.policy.client import Policy

_LOG = logging.getLogger(__name__)
_TRANSPORTS = {"ipc": Capability.IPC_REFIT, "collective": Capability.COLLECTIVE_REFIT}


class RemoteGeneration(Generation):
    """`Generation` on separate workers; `prepare_for_generation` refits them if their weights are stale."""

    worker: ClassVar[str] = "rlframework.generation.worker:GenerationWorker"
    """Import path (`module:Class`) of the worker class."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        manager: PluginManager,
        *,
        device: str = "cpu",
    ) -> None:
        """Start the workers of `config.generation.workers`, which have no weights before the first refit."""
        refit = config.generation.refit
        record = manager.select("generation_engine", config.generation.name).record
        assert isinstance(record, GenerationEngineRecord)
        self._starter = EngineStarter(self.worker, config, tokenizer, manager, device)
        engines = self._starter.start_all()
        try:
            super().__init__(policy, tokenizer, engines, probe_bounds=record.probe_bounds)
            common = [
                name for name, needed in _TRANSPORTS.items() if needed in policy.capabilities & record.capabilities
            ]
            only = common[0] if refit.transport == "auto" and len(common) == 1 else None
            probes = self._probes(config, tokenizer, record)
        except BaseException:
            for engine in engines:
                engine.shutdown()
            raise
        self._starting: dict[int, Future[RemoteEngine]] = {}
        """The engines that start in place of lost ones, by index."""
        self._receivers: Sequence[EngineHandle] = engines
        """The engines of the last refit."""
        self.refitter = Refitter(policy, self._engines_to_refit, refit, probes, only)
        self._policy, self._released = policy, False
        self._metrics: dict[str, float] = {}

    def _probes(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, record: GenerationEngineRecord
    ) -> Probes | None:
        """Return the probes of the refits: rows that both sides take, and that the model computes in one way."""
        policy, batching = config.policy, config.policy.batching
        bound = NoiseBound.of(
            config.generation.refit.probe_bound,
            record.probe_bounds,
            dtypes={self._starter.dtype, policy.precision},
            tf32=policy.tf32,
            headroom=PROBE_HEADROOM,
        )
        regimes = regime_limits(read_config(policy.model_name, policy.trust_remote_code))
        of_engine = record.longest_row(config.generation) if record.longest_row else None
        bounds = (self._limits.positions, of_engine, batching.logprob_tokens or batching.tokens, *regimes)
        return Probes.of(
            config.generation,
            tokenizer,
            bound,
            positions=min(filter(None, bounds), default=None),
            check=ResultContract(config.generation.name, self._limits.vocabulary).check_probes,
        )

    def prepare_for_generation(self) -> bool:
        """Refit the engines if their weights are stale or another engine has started; return True when they are ready.

        Raises `WorkerLost` if the start of an engine in place of a lost one has failed.
        """
        self._replace_lost()
        if self.refitter.is_stale() or any(start.done() for start in self._starting.values()) or not self._usable():
            self.refit()
        elif self._released:
            for engine in self._usable():
                engine.call("prepare_for_generation", tags=("kv_cache",))
        self._released = False
        return True

    @property
    def weights_version(self) -> int | None:
        """See `Generation.weights_version`; None also before a refit, and after one that failed."""
        return self.refitter.version

    def _require_ready(self) -> None:
        """See `Generation._require_ready`. There are none before a refit, and after one that failed."""
        self.refitter.require_committed()

    def finish_generation(self) -> bool:
        """Have engines that share a GPU with the trainer free their caches; others keep what they have computed."""
        if self.shares_gpu:
            run_in_loop(self.client.drain())
            self._released = all(all(engine.call("finish_generation")) for engine in self._usable())
        return True

    def refit(self, transport: str | None = None, buffer_bytes: float | None = None) -> RefitReport:
        """Send the policy's weights to the engines now, without those that are lost or get lost meanwhile.

        `transport` and `buffer_bytes` override `generation.refit`. Raises like `Refitter.refit`, like
        `prepare_for_generation`, and like `GenerationClient.drain` while requests are in progress.
        """
        run_in_loop(self.client.drain())
        try:
            report = self.refitter.refit(transport, buffer_bytes)
        except RefitError as error:
            if not any(engine.lost for engine in self._receivers):
                raise
            _LOG.warning("a refit failed because an engine was lost, and is repeated: %s", error)
            report = self.refitter.refit(transport, buffer_bytes)
        found = report.metrics()
        if self.client.timeline is not None:
            ended = time.perf_counter()
            started = ended - report.seconds
            if report.start_seconds:
                self.client.timeline.add(REFITS, "engine start", started - report.start_seconds, started)
            self.client.timeline.add(REFITS, "refit", started, ended)
        for name in found.keys() & {"time/refit", "time/engine_start"}:
            found[name] += self._metrics.get(name, 0.0)
        self._metrics |= found
        return report

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of the refits since the last call, and `generation/lost_engines` if there were any."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def shutdown(self) -> bool:
        """Shut the workers down; return False if one of them did not exit cleanly."""
        for start in self._starting.values():  # which shut down those that are lost
            start.add_done_callback(lambda started: started.exception() or started.result().shutdown())
        engines = [engine for index, engine in enumerate(self.client.engines) if index not in self._starting]
        with ThreadPoolExecutor(max(1, len(engines))) as threads:
            pending = [threads.submit(engine.shutdown) for engine in engines[1:]]
            return all([*(engine.shutdown() for engine in engines[:1]), *(each.result() for each in pending)])

    def _usable(self) -> list[EngineHandle]:
        return [engine for engine in self.client.engines if not engine.lost]

    @cached_property
    def shares_gpu(self) -> bool:
        """Whether an engine runs on a GPU of the trainer, or may, because its device is unknown."""
        trainer = {
            state["device"] for state in WorkerCalls(self._policy.worker_group).on_all(PolicyWorker.get_refit_state)
        }
        engines = {state["device"] for engine in self._usable() for state in engine.call("get_refit_state")}
        return share_gpu(trainer, engines)

    def _replace_lost(self) -> None:
        """Start an engine in place of each that was lost, beside the run."""
        for index, engine in enumerate(self.client.engines):
            if engine.lost and index not in self._starting:
                _LOG.warning("%s was lost, and is replaced: %s", engine.name, engine.loss)
                self._starting[index] = self._starter.starting(index, engine)
                self._metrics["generation/lost_engines"] = self._metrics.get("generation/lost_engines", 0.0) + 1.0

    def _engines_to_refit(self) -> Sequence[EngineHandle]:
        """Return the engines that are not lost, with those that have started in place of lost ones.

        Waits for one of the latter if there are no others.
        """
        self._replace_lost()
        if not self._usable():
            wait(self._starting.values(), return_when=FIRST_COMPLETED)
        for index in [index for index, start in self._starting.items() if start.done()]:
            self.client.replaced(index, self._starting.pop(index).result())
        self._receivers = self._usable()
        return self._receivers


def refit_policy_generation(
    policy: Policy,
    policy_generation: RemoteGeneration,
    colocated_inference: bool | None = None,
    _refit_buffer_size_gb: float | None = None,
) -> RefitReport:
    """Send the weights of `policy` to the engines of `policy_generation`, even if they are up to date.

    `colocated_inference`: True for IPC, False for a process group, None for `generation.refit.transport`.
    `_refit_buffer_size_gb`: GiB per group by IPC, overriding `generation.refit.buffer_mb`. The name and the arguments
    are NeMo-RL's.
    """
    transport = None if colocated_inference is None else "ipc" if colocated_inference else "collective"
    return policy_generation.refit(transport, None if _refit_buffer_size_gb is None else _refit_buffer_size_gb * 2**30)
