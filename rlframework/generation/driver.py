"""The driver's handles on generation: in the trainer's workers, or in workers of their own (`generation.workers`).

Workers of their own are worker groups like the trainer's, one for each engine, on this machine or on a cluster. With
`ray`, they may use another Python environment. A refit updates their weights before a rollout that would otherwise use
stale ones, and replaces engines that were lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.policy import ParallelismConfig
from rlframework.config.sections import RunConfig, WorkerGroupConfig
from rlframework.errors import RefitError
from rlframework.generation.batch import batch_of, requests_of
from rlframework.generation.client import GenerationClient
from rlframework.generation.engine_handle import EmbeddedEngines, EngineHandle, RemoteEngine
from rlframework.generation.stop_tokens import stop_tokens
from rlframework.interfaces.generation import GenerationRequest, GenerationResult
from rlframework.interfaces.named_sharding import policy_sharding
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.interfaces.worker_group import WorkerGroup, WorkerSpec
from rlframework.plugins.types import Capability, GenerationEngineRecord
from rlframework.policy.batch_checks import BatchLimits
from rlframework.weight_sync.coordinator import RefitReport, Refitter
from rlframework.weight_sync.ipc import GPU_PREFIX
from rlframework.weight_sync.proof import Probes
from rlframework.workers.dispatch import WorkerCalls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.plugins.manager import PluginManager
    from rlframework.policy.client import Policy

R = TypeVar("R")

_LOG = logging.getLogger(__name__)
_TRANSPORTS = {"ipc": Capability.IPC_REFIT, "collective": Capability.COLLECTIVE_REFIT}


class Generation:
    """Generates on all workers of a policy: `prepare_for_generation`, any number of `generate`, `finish_generation`."""

    def __init__(
        self, policy: Policy, tokenizer: PreTrainedTokenizerBase, engines: Sequence[EngineHandle] | None = None
    ) -> None:
        """Start nothing. `engines`: None for those embedded in the workers of `policy`."""
        run = policy.config
        self.config, self._limits = run.generation, BatchLimits.of(run.policy)
        self._pad_id = int(tokenizer.pad_token_id)
        self._stop_tokens = stop_tokens(run.generation, tokenizer, run.policy.model_name, run.policy.trust_remote_code)
        limit = run.generation.max_in_flight or 2 * run.generation.batch_size
        self.client = GenerationClient(engines or [EmbeddedEngines(policy.worker_group, "generation")], limit=limit)
        """The client of the engines, for requests that finish one by one."""

    def prepare_for_generation(self) -> bool:
        """Return True when ready; engines inside the trainer's processes always are."""
        return True

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of generation since the last call, by name; embedded engines have none."""
        return {}

    def shutdown(self) -> bool:
        """Shut down workers started only for generation; embedded engines have none."""
        for engine in self.client.engines:
            engine.close()
        return True

    def finish_generation(self) -> bool:
        """Have the engines free their caches between rollouts."""
        return all(all(engine.call("finish_generation")) for engine in self.client.engines)

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """Complete each row; input as in `rlframework.generation.batch.requests_of`, output as in `batch_of`.

        The engines get contiguous shards of nearly equal size, so adjacent equal prompts are mostly prefilled once.
        Raises a `BatchError`, before an engine gets anything, for prompts that are not as described there.
        """
        self._limits.check_prompts(data)
        requests = requests_of(data, self.config, self._stop_tokens, greedy=greedy)
        results = _run(self._complete(requests))
        return batch_of(results, [request.prompt_ids for request in requests], self._pad_id)

    async def _complete(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        shards = np.array_split(np.arange(len(requests)), self.client.lanes)
        lanes = [lane for lane, rows in enumerate(shards) for _ in rows]
        return await asyncio.gather(*map(self._complete_one, requests, lanes))

    async def _complete_one(self, request: GenerationRequest, lane: int) -> GenerationResult:
        return await self.client.generate(request, lane=lane)


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
            super().__init__(policy, tokenizer, engines)
            common = [
                name for name, needed in _TRANSPORTS.items() if needed in policy.capabilities & record.capabilities
            ]
            only = common[0] if refit.transport == "auto" and len(common) == 1 else None
            probes = Probes.of(
                config.generation,
                tokenizer,
                bounds=record.probe_bounds,
                dtype=self._starter.dtype,
                positions=self._limits.positions,
            )
        except BaseException:
            for engine in engines:
                engine.shutdown()
            raise
        self.refitter = Refitter(policy, self._replaced_engines, refit, probes, only)
        self._policy, self._released = policy, False
        self._metrics: dict[str, float] = {}

    def prepare_for_generation(self) -> bool:
        """Refit the engines if their weights are stale or an engine was lost; return True when they are ready."""
        if self.refitter.is_stale() or len(self._usable()) < len(self.client.engines):
            self.refit()
        elif self._released:
            for engine in self._usable():
                engine.restore(("kv_cache",))
        self._released = False
        return True

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """See `Generation.generate`. Raises `EngineNotReady` before a refit, and after one that failed."""
        self.refitter.require_committed()
        return super().generate(data, greedy)

    def finish_generation(self) -> bool:
        """Have engines that share a GPU with the trainer free their caches; others keep what they have computed."""
        if self._shares_gpu:
            self._released = all(all(engine.call("finish_generation")) for engine in self._usable())
        return True

    def refit(self, transport: str | None = None, buffer_bytes: float | None = None) -> RefitReport:
        """Send the policy's weights to the engines now, and replace engines that are lost or get lost meanwhile.

        `transport` and `buffer_bytes` override `generation.refit`. Raises like `Refitter.refit`.
        """
        try:
            report = self.refitter.refit(transport, buffer_bytes)
        except RefitError as error:
            if not any(engine.lost for engine in self.client.engines):
                raise
            _LOG.warning("a refit failed because an engine was lost, and is repeated: %s", error)
            report = self.refitter.refit(transport, buffer_bytes)
        found = report.metrics()
        found["time/refit"] += self._metrics.get("time/refit", 0.0)
        self._metrics |= found
        return report

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of the refits since the last call, and `generation/lost_engines` if there were any."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def shutdown(self) -> bool:
        """Shut the workers down; return False if one of them did not exit cleanly."""
        with ThreadPoolExecutor(len(self.client.engines)) as threads:
            return all(threads.map(EngineHandle.shutdown, self.client.engines))

    def _usable(self) -> list[EngineHandle]:
        return [engine for engine in self.client.engines if not engine.lost]

    @cached_property
    def _shares_gpu(self) -> bool:
        """Whether an engine runs on a GPU of the trainer, or may, because its device is unknown."""
        trainer = {
            state["device"] for state in WorkerCalls(self._policy.worker_group).on_all(PolicyWorker.get_refit_state)
        }
        engines = {state["device"] for engine in self._usable() for state in engine.call("get_refit_state")}
        return any(device.startswith(GPU_PREFIX) for device in (trainer if "" in engines else trainer & engines))

    def _replaced_engines(self) -> Sequence[EngineHandle]:
        """Return the engines, with a new one in place of each that was lost."""
        lost = [index for index, engine in enumerate(self.client.engines) if engine.lost]
        for index, engine in zip(lost, self._starter.start(lost), strict=True):
            self.client.engines[index].shutdown()
            self.client.replaced(index, engine)
        if lost:
            _LOG.warning("%d generation engine(s) were lost, and replaced", len(lost))
            self._metrics["generation/lost_engines"] = self._metrics.get("generation/lost_engines", 0.0) + len(lost)
        return self.client.engines


class EngineStarter:
    """Starts the engines of `generation.workers`, each in a worker group of its own."""

    def __init__(
        self,
        worker: str,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        manager: PluginManager,
        device: str,
    ) -> None:
        """`worker`: import path of the worker class."""
        workers, dtype = config.generation.workers, config.generation.refit.dtype
        assert workers is not None
        self._config, self._workers, self._manager, self._device = config, workers, manager, device
        self.dtype = config.policy.precision if dtype == "auto" else dtype
        """The dtype of the engines' weights."""
        engine = manager.select("generation_engine", config.generation.name).record
        assert isinstance(engine, GenerationEngineRecord)
        self._gpus = 1 if engine.gpus_per_engine is None else engine.gpus_per_engine(config.generation)
        self._python = workers.python or engine.py_executable
        self._target = worker
        self._kwargs = {
            "engine_target": engine.target,
            "generation": config.generation,
            "tokenizer": tokenizer,
            "model_name": config.policy.model_name,
            "precision": self.dtype,
            "tf32": config.policy.tf32,
            "cudnn_attention": config.policy.cudnn_attention,
        }

    def start_all(self) -> list[RemoteEngine]:
        """Start all engines."""
        return self.start(range(self._workers.num_workers))

    def start(self, indices: Sequence[int]) -> list[RemoteEngine]:
        """Start the engines of these indices; if one fails, the others are shut down.

        The first one starts alone, as it may start what they share, such as Ray; the others at the same time.
        """
        engines: list[RemoteEngine] = []
        try:
            engines += map(self._start_one, indices[:1])
            with ThreadPoolExecutor(max(1, len(indices) - 1)) as threads:
                pending = [threads.submit(self._start_one, index) for index in indices[1:]]
            engines += [each.result() for each in pending if each.exception() is None]
            for each in pending:
                each.result()
        except BaseException:
            for engine in engines:
                engine.shutdown()
            raise
        return engines

    def _start_one(self, index: int) -> RemoteEngine:
        config, workers = self._config, self._workers
        record = self._manager.select("worker_group", workers.group).record
        group_class: Any = self._manager.load(record)
        section: dict[str, Any] = {}
        if config.worker_group.name == workers.group:  # the trainer's, without what describes its own workers
            section = config.worker_group.model_dump(exclude_unset=True, exclude={"workers_per_node", "python"})
        section |= {"name": workers.group, "num_workers": 1, "deadlines": workers.deadlines}
        spec = WorkerSpec(
            target=self._target,
            kwargs={**self._kwargs, "index": index},
            plugins=tuple(config.plugins),
            # another environment need not have the backends installed
            fingerprint=None if self._python else self._manager.fingerprint(),
            py_executable=self._python,
            replica=index,
            replicas=workers.num_workers,
            gpus=self._gpus,
        )
        model = record.config_model or WorkerGroupConfig
        sharding = policy_sharding(1, ParallelismConfig())
        group: WorkerGroup = group_class(spec, model(**section), sharding=sharding, device=self._device)
        return RemoteEngine(group, f"generation engine {index}")


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


def start_generation(
    config: RunConfig, policy: Policy, tokenizer: PreTrainedTokenizerBase, manager: PluginManager, *, device: str
) -> Generation:
    """Return the handle on generation that `config` describes: in the workers of `policy`, or on separate workers."""
    if config.generation.workers is None:
        return Generation(policy, tokenizer)
    return RemoteGeneration(config, policy, tokenizer, manager, device=device)


def _run(task: Coroutine[Any, Any, R]) -> R:
    """Run `task` in an event loop; in another thread if this one has a running loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(task)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, task).result()
