"""`PolicyWorkerBase`: a policy worker, composed of a training engine and services that no engine needs to know.

A backend supplies an `Engine`, and its worker class names it:

    class MyPolicyWorker(PolicyWorkerBase):
        engine_class = MyEngine
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.base import Section
from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import GenerationConfig
from rlframework.interfaces.policy_worker import BytesMoved, PolicyWorker, Rows
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.plugins.discovery import load_target
from rlframework.policy.checkpoint_io import CheckpointIO
from rlframework.policy.embedded_generation import EmbeddedGeneration
from rlframework.policy.engine import Engine
from rlframework.policy.microbatching import Microbatching
from rlframework.policy.reporting import Reporting
from rlframework.policy.scoring import Scoring
from rlframework.policy.shared_state import Residency, TrainingProgress
from rlframework.policy.trained_weights import Adapters, TrainedWeights, require_adapters
from rlframework.policy.training_step import Training
from rlframework.policy.weight_sender import WeightSender
from rlframework.workers.device import prepare_device
from rlframework.workers.remote_calls import of_service

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.policy.scoring import BaseReference, SnapshotReference


def _prepared_device(config: PolicyConfig, context: WorkerContext) -> torch.device:
    """Return the worker's device, with torch's settings for it made."""
    # a worker sees only its own GPU, as device 0
    device = torch.device("cuda", 0) if context.device == "cuda" else torch.device(context.device)
    prepare_device(
        str(device),
        tf32=config.tf32,
        cudnn_attention=config.cudnn_attention,
        expandable_segments=config.expandable_segments,
    )
    return device


class PolicyWorkerBase(PolicyWorker):
    """A policy worker around an `Engine`."""

    engine_class: ClassVar[type[Engine]]
    """The training engine."""

    def __init__(
        self,
        config: PolicyConfig | Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        *,
        context: WorkerContext | None = None,
        backend_config: Mapping[str, Any] | Section | None = None,
        generation: GenerationConfig | None = None,
        generation_target: str | None = None,
        processor_target: str = "rlframework.policy.microbatches.data_processor:MicrobatchProcessor",
    ) -> None:
        """Build the model on this rank.

        `config`: the backend-neutral keys of `policy`; a dictionary is validated. `backend_config`: the backend's own
        section. `generation`, `generation_target`: settings and class (`module:Class`) of the embedded generation
        engine. `processor_target`: class of the data processor, which makes microbatches.
        `weights_path`, `optimizer_path`: the checkpoint to resume from, as for `load_checkpoint`.
        """
        config = config if isinstance(config, PolicyConfig) else PolicyConfig.model_validate(dict(config))
        context, generation = context or WorkerContext(), generation or GenerationConfig()
        device = _prepared_device(config, context)
        section = self.engine_class.backend_config_model.model_validate(backend_config or {})
        self.engine = engine = self.engine_class(config, section, tokenizer, context, device)
        self.progress = TrainingProgress()
        self.residency = Residency(engine)
        self.generation = EmbeddedGeneration(engine, self.residency, self.progress, generation, generation_target)
        self._build(init_optimizer)
        self._add_services(generation, processor_target, init_optimizer, init_reference_model)
        if weights_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

    def _build(self, init_optimizer: bool) -> None:
        """Build the model; sets the threads and seeds of this process."""
        engine, context = self.engine, self.engine.context
        if context.threads:
            torch.set_num_threads(context.threads)
        self.memory = self.residency.memory
        engine.build(init_optimizer=init_optimizer)
        self.memory.model_built()
        if context.master_port:  # a process of its own, which torch has seeded differently from any other
            group = engine.data_parallel_group()  # ranks that compute the same rows must draw the same numbers
            torch.manual_seed(0 if group is None else group.rank())

    def _add_services(
        self, generation: GenerationConfig, processor_target: str, init_optimizer: bool, init_reference_model: bool
    ) -> None:
        """Add the services that need a model, before a checkpoint is loaded: the reference is a copy of it."""
        engine, residency, progress = self.engine, self.residency, self.progress
        adapters = engine.config.lora is not None
        reference: SnapshotReference | BaseReference | None = None
        if init_reference_model:
            from rlframework.policy.scoring import BaseReference, SnapshotReference

            reference = BaseReference(engine) if adapters else SnapshotReference(engine)
        temperature = generation.temperature or 1.0  # greedy samples are scored at temperature 1
        microbatching = Microbatching(engine, load_target(processor_target)(config=engine.config.batching))
        self.training = Training(engine, microbatching, residency, progress, self.memory, temperature, init_optimizer)
        self.scoring = Scoring(engine, microbatching, residency, temperature, reference)
        self.weights = (Adapters if adapters else TrainedWeights)(engine, generation)
        self.checkpoints = CheckpointIO(
            engine, residency, self.weights, progress, type(self).__name__, init_optimizer, reference
        )
        self.sender = WeightSender(engine, residency, self.weights, progress, generation.refit)
        self.reporting = Reporting(engine, microbatching, self.memory)

    def __repr__(self) -> str:
        return f"{type(self).__name__}[rank={self.engine.context.rank}]"

    train = of_service("training", Training.train)
    get_logprobs = of_service("scoring", Scoring.get_logprobs)
    get_topk_logits = of_service("scoring", Scoring.get_topk_logits)
    get_token_set_logprobs = of_service("scoring", Scoring.get_token_set_logprobs)
    use_reference_model = of_service("scoring", Scoring.use_reference_model)
    sync_reference = of_service("scoring", Scoring.sync_reference)
    score = of_service("scoring", Scoring.score)
    get_values = of_service("scoring", Scoring.get_values)
    exchange = of_service("generation", EmbeddedGeneration.exchange)
    finish_generation = of_service("generation", EmbeddedGeneration.finish)
    prepare_for_lp_inference = of_service("residency", Residency.prepare_for_lp_inference)
    save_checkpoint = of_service("checkpoints", CheckpointIO.save)
    checkpoint_written = of_service("checkpoints", CheckpointIO.written)
    finish_checkpoint = of_service("checkpoints", CheckpointIO.finish)
    load_checkpoint = of_service("checkpoints", CheckpointIO.load)
    get_refit_state = of_service("sender", WeightSender.state)
    get_sent_checksums = of_service("sender", WeightSender.sent_checksums)
    prepare_weights_for_ipc = of_service("sender", WeightSender.prepare_ipc)
    get_weights_ipc_handles = of_service("sender", WeightSender.ipc_handles)
    reserve_refit_address = of_service("sender", WeightSender.reserve_address)
    init_collective = of_service("sender", WeightSender.join)
    prepare_info_for_collective = of_service("sender", WeightSender.collective_info)
    broadcast_weights_for_collective = of_service("sender", WeightSender.broadcast)
    get_info = of_service("reporting", Reporting.info)
    get_gpu_info = of_service("reporting", Reporting.gpu_info)
    report_device_id = of_service("reporting", Reporting.device_id)
    reset_peak_memory_stats = of_service("reporting", Reporting.reset_peak_memory)
    start_profiling = of_service("reporting", Reporting.start_profiling)
    stop_profiling = of_service("reporting", Reporting.stop_profiling)
    start_gpu_profiling = of_service("reporting", Reporting.start_gpu_profiling)
    stop_gpu_profiling = of_service("reporting", Reporting.stop_gpu_profiling)

    def get_reference_policy_logprobs(
        self, data: Rows, micro_batch_size: int | None = None, positions: str = "all"
    ) -> Rows:
        """See `PolicyWorker.get_reference_policy_logprobs`."""
        with self.use_reference_model():
            logprobs = self.get_logprobs(data, micro_batch_size, positions)
        return BatchedDataDict({"reference_logprobs": logprobs["logprobs"]})

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> BytesMoved:
        """See `PolicyWorker.prepare_for_training`."""
        return self.residency.onload("model", "optimizer")

    def offload_before_refit(self) -> BytesMoved:
        """See `PolicyWorker.offload_before_refit`."""
        return self.residency.offload("optimizer")

    def offload_after_refit(self) -> BytesMoved:
        """See `PolicyWorker.offload_after_refit`."""
        self.sender.release_gpu_buffers()
        return self.residency.offload("model", "optimizer")

    def save_pretrained(self, path: str) -> None:
        """See `PolicyWorker.save_pretrained`."""
        self.residency.require_policy("save_pretrained")
        self.residency.onload("model")
        self.weights.save_pretrained(path)

    def save_adapter(self, path: str) -> None:
        """See `PolicyWorker.save_adapter`."""
        adapters = require_adapters(self.weights)
        self.residency.onload("model")
        adapters.save(path)

    def load_adapter(self, path: str) -> None:
        """See `PolicyWorker.load_adapter`."""
        adapters = require_adapters(self.weights)
        self.residency.onload("model")
        adapters.read(path)
        self.progress.weights_version += 1

    def is_alive(self) -> bool:
        """See `PolicyWorker.is_alive`."""
        return True

    def shutdown(self) -> None:
        """See `PolicyWorker.shutdown`."""
        self.generation.close()
        self.scoring.reference = self.checkpoints.reference = None
        self.reporting.stop_profiling(None)
        self.checkpoints.abandon()
        self.sender.close()
        self.engine.close()
