"""The driver's handles on generation: in the trainer's workers, or in workers of their own (`generation.workers`).

Workers of their own run on a worker group like the trainer's, on this machine or on a cluster. With `ray`, they may use
another Python environment. A refit updates their weights before a rollout that would otherwise use stale ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.policy import ParallelismConfig
from rlframework.config.sections import GenerationConfig, RunConfig, WorkerGroupConfig
from rlframework.interfaces.named_sharding import policy_sharding
from rlframework.interfaces.worker_group import WorkerGroup, WorkerSpec
from rlframework.plugins.types import Capability
from rlframework.policy.batch_checks import BatchLimits
from rlframework.weight_sync.coordinator import RefitReport, Refitter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.plugins.manager import PluginManager
    from rlframework.policy.client import Policy

_SHARDED = "data_parallel"
_TRANSPORTS = {"ipc": Capability.IPC_REFIT, "collective": Capability.COLLECTIVE_REFIT}


class Generation:
    """Generates on all workers of a policy: `prepare_for_generation`, any number of `generate`, `finish_generation`."""

    def __init__(
        self,
        worker_group: WorkerGroup,
        config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        limits: BatchLimits | None = None,
    ) -> None:
        """`config`, `tokenizer` and `limits` (None: unknown) must be those of the workers. Starts nothing."""
        self.worker_group, self.config, self._limits = worker_group, config, limits or BatchLimits()
        self._pad_id = int(tokenizer.pad_token_id)

    def prepare_for_generation(self) -> bool:
        """Return True when ready; engines inside the trainer's processes always are."""
        return True

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of generation since the last call, by name; embedded engines have none."""
        return {}

    def shutdown(self) -> bool:
        """Shut down workers started only for generation; embedded engines have none."""
        return True

    def finish_generation(self) -> bool:
        """Have the engines free their caches between rollouts."""
        future = self.worker_group.run_all_workers_single_data("finish_generation")
        return all(self.worker_group.get_all_worker_results(future))

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """Complete each row; input and output as in `GenerationEngine.generate`.

        The data-parallel ranks get contiguous shards of nearly equal size, so that adjacent equal prompts are mostly
        prefilled once. With fewer rows than ranks, a rank without rows completes one whose result is discarded. Raises
        a `BatchError`, before a worker gets anything, for prompts that are not as described there.
        """
        self._limits.check_prompts(data)
        sharding = self.worker_group.sharding
        replicated = [axis for axis in sharding.names if axis != _SHARDED]
        parts = np.array_split(np.arange(data.size), sharding.get_axis_size(_SHARDED))
        future = self.worker_group.run_all_workers_sharded_data(
            "generate",
            data=[data.select_indices(rows.tolist() or [0]) for rows in parts],
            in_sharded_axes=[_SHARDED],
            replicate_on_axes=replicated,
            output_is_replicated=replicated,
            common_kwargs={"greedy": greedy},
        )
        results = self.worker_group.get_all_worker_results(future)
        kept = [result for result, rows in zip(results, parts, strict=True) if len(rows)]
        return BatchedDataDict.from_batches(kept, pad_value_dict={"output_ids": self._pad_id})


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
        engine = manager.select("generation_engine", config.generation.name).record
        workers, limits = _start(self.worker, config, tokenizer, manager, device), BatchLimits.of(config.policy)
        super().__init__(workers, config.generation, tokenizer, limits)
        self._policy = policy
        self._metrics: dict[str, float] = {}
        capabilities = policy.capabilities & engine.capabilities
        common = [name for name, capability in _TRANSPORTS.items() if capability in capabilities]
        only = common[0] if refit.transport == "auto" and len(common) == 1 else None
        self.refitter = Refitter(policy.worker_group, self.worker_group, refit, only)

    def prepare_for_generation(self) -> bool:
        """Refit the engines if their weights are stale; return True when they are ready."""
        if self.refitter.is_stale():
            self.refit()
        return self.prepare_engines()

    def refit(self) -> RefitReport:
        """Send the policy's weights to the engines now."""
        report = refit_policy_generation(self._policy, self)
        spent = self._metrics.get("time/refit", 0.0)
        self._metrics = {"time/refit": spent + report.seconds, "refit/mb": report.size / 2**20}
        return report

    def prepare_engines(self, **arguments: Any) -> bool:
        """Call `GenerationEngine.prepare_for_generation` on all workers, within the deadline of a refit."""
        future = self.worker_group.run_all_workers_single_data("prepare_for_generation", **arguments)
        future.deadline = self.config.refit.deadline
        return all(self.worker_group.get_all_worker_results(future))

    def pop_metrics(self) -> dict[str, float]:
        """Return `time/refit` in seconds and `refit/mb` of the refits since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def shutdown(self) -> bool:
        """Shut the workers down; return False if one of them did not exit cleanly."""
        return self.worker_group.shutdown(cleanup_method="shutdown")


def refit_policy_generation(
    policy: Policy,
    policy_generation: RemoteGeneration,
    colocated_inference: bool | None = None,
    _refit_buffer_size_gb: float | None = None,
) -> RefitReport:
    """Send the weights of `policy` to the engines of `policy_generation`, even if they are up to date.

    Where an engine shares a GPU with the trainer and the backend declares `cpu_offload`, the optimizer is offloaded
    before the transfer and the model after it.

    `colocated_inference`: True for IPC, False for a process group, None for `generation.refit.transport`.
    `_refit_buffer_size_gb`: GiB per group by IPC, overriding `generation.refit.buffer_mb`.
    """
    offload = Capability.CPU_OFFLOAD in policy.capabilities and policy_generation.refitter.shares_gpu
    if offload:
        policy.offload_before_refit()
    policy_generation.prepare_engines(tags=["weights"])
    transport = None if colocated_inference is None else "ipc" if colocated_inference else "collective"
    buffer_bytes = None if _refit_buffer_size_gb is None else _refit_buffer_size_gb * 2**30
    report = policy_generation.refitter.refit(transport, buffer_bytes)
    if offload:
        policy.offload_after_refit()
    policy_generation.prepare_engines(tags=["kv_cache"])
    return report


def start_generation(
    config: RunConfig, policy: Policy, tokenizer: PreTrainedTokenizerBase, manager: PluginManager, *, device: str
) -> Generation:
    """Return the handle on generation that `config` describes: in the workers of `policy`, or on separate workers."""
    if config.generation.workers is None:
        return Generation(policy.worker_group, config.generation, tokenizer, BatchLimits.of(config.policy))
    return RemoteGeneration(config, policy, tokenizer, manager, device=device)


def _start(
    worker: str, config: RunConfig, tokenizer: PreTrainedTokenizerBase, manager: PluginManager, device: str
) -> WorkerGroup:
    workers, dtype = config.generation.workers, config.generation.refit.dtype
    assert workers is not None
    engine = manager.select("generation_engine", config.generation.name).record
    other_python = workers.python or engine.py_executable
    spec = WorkerSpec(
        target=worker,
        kwargs={
            "engine_target": engine.target,
            "generation": config.generation,
            "tokenizer": tokenizer,
            "model_name": config.policy.model_name,
            "precision": config.policy.precision if dtype == "auto" else dtype,
            "tf32": config.policy.tf32,
            "cudnn_attention": config.policy.cudnn_attention,
        },
        plugins=tuple(config.plugins),
        # another environment need not have the backends installed
        fingerprint=None if other_python else manager.fingerprint(),
        py_executable=other_python,
    )
    record = manager.select("worker_group", workers.group).record
    group_class: Any = manager.load(record)
    section: dict[str, Any] = {}
    if config.worker_group.name == workers.group:  # the trainer's section, without what describes its own workers
        section = config.worker_group.model_dump(exclude_unset=True, exclude={"workers_per_node", "python"})
    section |= {"name": workers.group, "num_workers": workers.num_workers, "deadlines": workers.deadlines}
    sharding = policy_sharding(workers.num_workers, ParallelismConfig())
    model = record.config_model or WorkerGroupConfig
    group: WorkerGroup = group_class(spec, model(**section), sharding=sharding, device=device)
    return group
