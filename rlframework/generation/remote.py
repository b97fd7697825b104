"""Generation workers in separate processes (`generation.workers`), and the driver's handle on them.

They run on a worker group like the trainer's, on this machine or on a cluster. With `ray`, they may use another Python
environment. A refit updates their weights before a rollout that would otherwise use stale ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rlframework.config.policy import ParallelismConfig
from rlframework.config.sections import WorkerGroupConfig
from rlframework.generation.client import Generation
from rlframework.interfaces.named_sharding import policy_sharding
from rlframework.interfaces.worker_group import WorkerGroup, WorkerSpec
from rlframework.plugins.types import Capability
from rlframework.weight_sync.coordinator import RefitReport, Refitter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import GenerationWorkersConfig, RunConfig
    from rlframework.plugins.manager import PluginManager
    from rlframework.policy.client import Policy


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
        assert config.generation.workers is not None
        engine = manager.select("generation_engine", config.generation.name).record
        super().__init__(_start(self.worker, config, tokenizer, manager, device), config.generation, tokenizer)
        self._policy = policy
        self._metrics: dict[str, float] = {}
        transport = _transport(config.generation.refit.transport, policy.capabilities & engine.capabilities)
        self.refitter = Refitter(policy.worker_group, self._group, config.generation.refit, transport)

    @property
    def worker_group(self) -> WorkerGroup:
        """The worker group of the generation workers."""
        return self._group

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
        future = self._group.run_all_workers_single_data("prepare_for_generation", **arguments)
        future.deadline = self.config.refit.deadline
        return all(self._group.get_all_worker_results(future))

    def pop_metrics(self) -> dict[str, float]:
        """Return `time/refit` in seconds and `refit/mb` of the refits since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def shutdown(self) -> bool:
        """Shut the workers down; return False if one of them did not exit cleanly."""
        return self._group.shutdown(cleanup_method="shutdown")


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
        return Generation(policy.worker_group, config.generation, tokenizer)
    return RemoteGeneration(config, policy, tokenizer, manager, device=device)


def _transport(wanted: str, declared: frozenset[Capability]) -> str:
    """Return `wanted`; if it is `auto` and backend and engine have only one transport in common, that one."""
    capabilities = {"ipc": Capability.IPC_REFIT, "collective": Capability.COLLECTIVE_REFIT}
    common = [name for name, capability in capabilities.items() if capability in declared]
    return common[0] if wanted == "auto" and len(common) == 1 else wanted


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
        },
        plugins=tuple(config.plugins),
        # another environment need not have the backends installed
        fingerprint=None if other_python else manager.fingerprint(),
        py_executable=other_python,
    )
    record = manager.select("worker_group", workers.group).record
    group_class: Any = manager.load(record)
    sharding = policy_sharding(workers.num_workers, ParallelismConfig())
    group: WorkerGroup = group_class(
        spec, _group_config(config, workers, record.config_model or WorkerGroupConfig), sharding=sharding, device=device
    )
    return group


def _group_config(config: RunConfig, workers: GenerationWorkersConfig, model: Any) -> WorkerGroupConfig:
    """Return the generation workers' section: based on the trainer's `worker_group` if both use the same group."""
    same = config.worker_group.name == workers.group
    values: dict[str, Any] = config.worker_group.model_dump(exclude_unset=True) if same else {}
    for key in ("workers_per_node", "python"):  # these describe the trainer's workers
        values.pop(key, None)
    own = {"name": workers.group, "num_workers": workers.num_workers, "deadlines": workers.deadlines}
    section: WorkerGroupConfig = model(**{**values, **own})
    return section
