"""Generation workers in processes of their own, and the driver's handle on them: `generation.workers`.

They run on a worker group as the trainer does, on this machine or on a cluster, with `ray` in another Python
environment too. Their weights come by refits, before a rollout whose weights would be stale.
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
    """`Generation` on workers of its own: `prepare_for_generation` refits them where the policy has moved on."""

    worker: ClassVar[str] = "rlframework.generation.worker:GenerationWorker"
    """Import path of what holds an engine in each process."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        manager: PluginManager,
        *,
        device: str = "cpu",
    ) -> None:
        """Start the workers of `config.generation.workers`. They have no weights before the first refit."""
        assert config.generation.workers is not None
        engine = manager.select("generation_engine", config.generation.name).record
        super().__init__(_start(self.worker, config, tokenizer, manager, device), config.generation, tokenizer)
        self._policy = policy
        self._metrics: dict[str, float] = {}
        transport = _transport(config.generation.refit.transport, policy.capabilities & engine.capabilities)
        self.refitter = Refitter(policy.worker_group, self._group, config.generation.refit, transport)

    @property
    def worker_group(self) -> WorkerGroup:
        """The group of the generation workers."""
        return self._group

    def prepare_for_generation(self) -> bool:
        """Refit where the policy's weights are others than the engines'; True when they are ready."""
        if self.refitter.is_stale():
            self.refit()
        return self.prepare_engines()

    def refit(self) -> RefitReport:
        """Bring the policy's weights to the engines now."""
        report = refit_policy_generation(self._policy, self)
        spent = self._metrics.get("time/refit", 0.0)
        self._metrics = {"time/refit": spent + report.seconds, "refit/mb": report.size / 2**20}
        return report

    def prepare_engines(self, **arguments: Any) -> bool:
        """`GenerationEngine.prepare_for_generation` on all workers, within the deadline of a refit."""
        future = self._group.run_all_workers_single_data("prepare_for_generation", **arguments)
        future.deadline = self.config.refit.deadline
        return all(self._group.get_all_worker_results(future))

    def pop_metrics(self) -> dict[str, float]:
        """`time/refit` in seconds and `refit/mb` of the refits since this was last called."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def shutdown(self) -> bool:
        """End the workers; False when one did not end in peace."""
        return self._group.shutdown(cleanup_method="shutdown")


def refit_policy_generation(
    policy: Policy,
    policy_generation: RemoteGeneration,
    colocated_inference: bool | None = None,
    _refit_buffer_size_gb: float | None = None,
) -> RefitReport:
    """Bring the weights of `policy` to the engines of `policy_generation`, whether they are stale or not.

    `colocated_inference`: by IPC (True) or over a process group (False); None: as `generation.refit.transport` says.
    `_refit_buffer_size_gb`: GiB of a group by IPC in place of `generation.refit.buffer_mb`.
    """
    policy.offload_before_refit()
    policy_generation.prepare_engines(tags=["weights"])
    transport = None if colocated_inference is None else "ipc" if colocated_inference else "collective"
    buffer_bytes = None if _refit_buffer_size_gb is None else _refit_buffer_size_gb * 2**30
    report = policy_generation.refitter.refit(transport, buffer_bytes)
    policy.offload_after_refit()
    policy_generation.prepare_engines(tags=["kv_cache"])
    return report


def start_generation(
    config: RunConfig, policy: Policy, tokenizer: PreTrainedTokenizerBase, manager: PluginManager, *, device: str
) -> Generation:
    """The handle on generation that `config` asks for: in the workers of `policy`, or on workers of its own."""
    if config.generation.workers is None:
        return Generation(policy.worker_group, config.generation, tokenizer)
    return RemoteGeneration(config, policy, tokenizer, manager, device=device)


def _transport(wanted: str, declared: frozenset[Capability]) -> str:
    """`wanted`; the only one that backend and engine declare where it is `auto`."""
    of = {"ipc": Capability.IPC_REFIT, "collective": Capability.COLLECTIVE_REFIT}
    there = [name for name, capability in of.items() if capability in declared]
    return there[0] if wanted == "auto" and len(there) == 1 else wanted


def _start(
    worker: str, config: RunConfig, tokenizer: PreTrainedTokenizerBase, manager: PluginManager, device: str
) -> WorkerGroup:
    workers, given = config.generation.workers, config.generation.refit.dtype
    assert workers is not None
    engine = manager.select("generation_engine", config.generation.name).record
    elsewhere = workers.python or engine.py_executable
    spec = WorkerSpec(
        target=worker,
        kwargs={
            "engine_target": engine.target,
            "generation": config.generation,
            "tokenizer": tokenizer,
            "model_name": config.policy.model_name,
            "precision": config.policy.precision if given == "auto" else given,
        },
        plugins=tuple(config.plugins),
        fingerprint=None if elsewhere else manager.fingerprint(),  # another environment need not have the backends
        py_executable=elsewhere,
    )
    record = manager.select("worker_group", workers.group).record
    group: Any = manager.load(record)
    sharding = policy_sharding(workers.num_workers, ParallelismConfig())
    made: WorkerGroup = group(
        spec, _group_config(config, workers, record.config_model or WorkerGroupConfig), sharding=sharding, device=device
    )
    return made


def _group_config(config: RunConfig, workers: GenerationWorkersConfig, model: Any) -> WorkerGroupConfig:
    """The section of a worker group for them: what the trainer's says of that group, with their own keys."""
    same = config.worker_group.name == workers.group
    values: dict[str, Any] = config.worker_group.model_dump(exclude_unset=True) if same else {}
    for key in ("workers_per_node", "python"):  # these are of the trainer's workers
        values.pop(key, None)
    own = {"name": workers.group, "num_workers": workers.num_workers, "deadlines": workers.deadlines}
    section: WorkerGroupConfig = model(**{**values, **own})
    return section
