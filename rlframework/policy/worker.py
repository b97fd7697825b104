"""`PolicyWorkerBase`: a policy worker, composed of a training engine and services that no engine needs to know.

A backend supplies an `Engine`, and its worker class names it:

    class MyPolicyWorker(PolicyWorkerBase):
        engine_class = MyEngine

The services are objects with their own constructors: `training` (`training_step.py`), `scoring`, `generation`
(`embedded_generation.py`), `checkpoints` (`checkpoint_io.py`), `weights` (`trained_weights.py`, or `lora.py` with
adapters), `sender` (`weight_sender.py`), `residency` and `reporting`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.base import Section
from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import GenerationConfig
from rlframework.errors import NotSupported
from rlframework.interfaces.loss import LossFunction
from rlframework.interfaces.policy_worker import (
    BytesMoved,
    PolicyWorker,
    RefitState,
    TrainResult,
    WorkerInfo,
)
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.plugins.loading import load_target
from rlframework.policy.checkpoint_io import CheckpointIO
from rlframework.policy.embedded_generation import EmbeddedGeneration
from rlframework.policy.engine import Engine
from rlframework.policy.lora import Adapters, BaseReference, require_adapters
from rlframework.policy.microbatching import Microbatching
from rlframework.policy.progress import TrainingProgress
from rlframework.policy.reporting import Reporting
from rlframework.policy.residency import Residency
from rlframework.policy.scoring import Reference, Scoring, SnapshotReference
from rlframework.policy.trained_weights import TrainedWeights
from rlframework.policy.training_step import Training
from rlframework.policy.weight_sender import WeightSender
from rlframework.weight_sync.buffers import WeightInfo
from rlframework.weight_sync.coordinator import attempt
from rlframework.weight_sync.ipc import GroupHandles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = BatchedDataDict[Any]


class PolicyWorkerBase(PolicyWorker):
    """A policy worker around an `Engine`."""

    engine_class: ClassVar[type[Engine]]
    """The training engine."""

    microbatching_class: ClassVar[type[Microbatching]] = Microbatching
    training_class: ClassVar[type[Training]] = Training
    scoring_class: ClassVar[type[Scoring]] = Scoring
    weights_class: ClassVar[type[TrainedWeights]] = TrainedWeights
    checkpoints_class: ClassVar[type[CheckpointIO]] = CheckpointIO

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
        processor_target: str = "rlframework.microbatches.data_processor:MicrobatchProcessor",
    ) -> None:
        """Build the model on this rank.

        `config`: the backend-neutral keys of `policy`; a dictionary is validated. `backend_config`: the backend's own
        section. `generation`, `generation_target`: settings and class (`module:Class`) of the embedded generation
        engine. `processor_target`: class of the data processor, which makes microbatches.
        `weights_path`, `optimizer_path`: the checkpoint to resume from, as for `load_checkpoint`.
        """
        config = config if isinstance(config, PolicyConfig) else PolicyConfig.model_validate(dict(config))
        context, generation = context or WorkerContext(), generation or GenerationConfig()
        # a worker sees only its own GPU, as device 0
        device = torch.device("cuda", 0) if context.device == "cuda" else torch.device(context.device)
        section = self.engine_class.backend_config_model.model_validate(backend_config or {})
        self.engine = engine = self.engine_class(config, section, tokenizer, context, device)
        self._has_optimizer = init_optimizer
        self.progress = TrainingProgress()
        self.residency = Residency(engine)
        self.generation = EmbeddedGeneration(engine, self.residency, self.progress, generation, generation_target)
        if context.threads:
            torch.set_num_threads(context.threads)
        engine.build(init_optimizer=init_optimizer)
        self._compose(generation, processor_target, self._make_reference() if init_reference_model else None)
        if weights_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

    def _make_reference(self) -> Reference:
        """Keep a copy of the weights, before a checkpoint is loaded; with adapters the base itself is the reference."""
        return SnapshotReference(self.engine) if self.engine.config.lora is None else BaseReference(self.engine)

    def _compose(self, generation: GenerationConfig, processor_target: str, reference: Reference | None) -> None:
        engine, residency, progress = self.engine, self.residency, self.progress
        lora = engine.config.lora
        temperature = generation.temperature or 1.0  # greedy samples are scored at temperature 1
        microbatching = self.microbatching_class(engine, load_target(processor_target)())
        self.training = self.training_class(engine, microbatching, residency, progress, temperature)
        self.scoring = self.scoring_class(engine, microbatching, residency, temperature, reference)
        self.weights = self.weights_class(engine, generation) if lora is None else Adapters(engine, generation, lora)
        self.checkpoints = self.checkpoints_class(
            engine,
            residency,
            self.weights,
            progress,
            backend=type(self).__name__,
            has_optimizer=self._has_optimizer,
        )
        self.sender = WeightSender(engine, residency, self.weights, progress, generation.refit)
        self.reporting = Reporting(engine, microbatching)

    def __repr__(self) -> str:
        return f"{type(self).__name__}[rank={self.engine.context.rank}]"

    def _require_head(self, head: str, method: str) -> None:
        config = self.engine.config
        if config.head != head:
            raise NotSupported(
                f"{method} needs policy.head={head}, but policy.model_name={config.model_name!r} was loaded "
                f"with policy.head={config.head}"
            )

    # -- training, scoring, generation --------------------------------------------------------------------------------

    def train(
        self,
        data: Rows,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> TrainResult:
        """See `PolicyWorker.train`."""
        self._require_head("language", "train")
        if not eval_mode and not self._has_optimizer:
            raise NotSupported("this worker was built without an optimizer; build it with init_optimizer=True to train")
        return self.training.train(data, loss_fn, eval_mode, gbs, mbs)

    def get_logprobs(
        self, data: Rows, micro_batch_size: int | None = None, positions: str = "all", entropy: bool = False
    ) -> Rows:
        """See `PolicyWorker.get_logprobs`."""
        self._require_head("language", "get_logprobs")
        return self.scoring.get_logprobs(data, micro_batch_size, positions, entropy)

    def get_topk_logits(self, data: Rows, k: int, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """See `PolicyWorker.get_topk_logits`."""
        self._require_head("language", "get_topk_logits")
        return self.scoring.get_topk_logits(data, k, micro_batch_size, positions)

    def get_reference_policy_logprobs(
        self, data: Rows, micro_batch_size: int | None = None, positions: str = "all"
    ) -> Rows:
        """See `PolicyWorker.get_reference_policy_logprobs`."""
        with self.use_reference_model():
            logprobs = self.get_logprobs(data, micro_batch_size, positions)
        return BatchedDataDict({"reference_logprobs": logprobs["logprobs"]})

    def use_reference_model(self) -> AbstractContextManager[None]:
        """See `PolicyWorker.use_reference_model`."""
        return self.scoring.use_reference_model()

    def score(self, data: Rows, micro_batch_size: int | None = None) -> Rows:
        """See `PolicyWorker.score`."""
        self._require_head("score", "score")
        return self.scoring.score(data, micro_batch_size)

    def generate(self, data: Rows, greedy: bool = False) -> Rows:
        """See `PolicyWorker.generate`."""
        self._require_head("language", "generate")
        return self.generation.generate(data, greedy)

    def finish_generation(self) -> bool:
        """See `PolicyWorker.finish_generation`."""
        return self.generation.finish()

    # -- placement ----------------------------------------------------------------------------------------------------

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> BytesMoved:
        """See `PolicyWorker.prepare_for_training`."""
        return self.residency.onload("model", "optimizer")

    def prepare_for_lp_inference(self) -> BytesMoved:
        """See `PolicyWorker.prepare_for_lp_inference`."""
        return self.residency.prepare_for_lp_inference()

    def offload_before_refit(self) -> BytesMoved:
        """See `PolicyWorker.offload_before_refit`."""
        return self.residency.offload("optimizer")

    def offload_after_refit(self) -> BytesMoved:
        """See `PolicyWorker.offload_after_refit`."""
        return self.residency.offload("model", "optimizer")

    # -- files --------------------------------------------------------------------------------------------------------

    def save_pretrained(self, path: str) -> None:
        """See `PolicyWorker.save_pretrained`."""
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

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        *,
        form: str = "portable",
        asynchronous: bool = False,
    ) -> None:
        """See `PolicyWorker.save_checkpoint`."""
        self.checkpoints.save(weights_path, optimizer_path, tokenizer_path, form, asynchronous)

    def checkpoint_written(self) -> bool:
        """See `PolicyWorker.checkpoint_written`."""
        return self.checkpoints.written()

    def finish_checkpoint(self) -> None:
        """See `PolicyWorker.finish_checkpoint`."""
        self.checkpoints.finish()

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """See `PolicyWorker.load_checkpoint`."""
        self.checkpoints.load(weights_path, optimizer_path)

    # -- weight sync --------------------------------------------------------------------------------------------------

    def get_refit_state(self) -> RefitState:
        """See `PolicyWorker.get_refit_state`."""
        return self.sender.state()

    def prepare_weights_for_ipc(
        self, receive_buffers: Mapping[str, Any] | None = None
    ) -> tuple[list[tuple[str, int]], float]:
        """See `PolicyWorker.prepare_weights_for_ipc`."""
        return self.sender.prepare_ipc(receive_buffers)

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, GroupHandles]:
        """See `PolicyWorker.get_weights_ipc_handles`."""
        return self.sender.ipc_handles(keys)

    def reserve_refit_address(self) -> tuple[str, int]:
        """See `PolicyWorker.reserve_refit_address`."""
        return self.sender.reserve_address()

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """See `PolicyWorker.init_collective`."""
        self.sender.join(ip, port, world_size)

    def prepare_info_for_collective(self) -> WeightInfo:
        """See `PolicyWorker.prepare_info_for_collective`."""
        return self.sender.collective_info()

    def broadcast_weights_for_collective(self) -> None:
        """See `PolicyWorker.broadcast_weights_for_collective`."""
        self.sender.broadcast()

    def attempt(self, method: str, arguments: Mapping[str, Any]) -> tuple[Any, str]:
        """See `PolicyWorker.attempt`."""
        return attempt(self, f"rank {self.engine.context.rank} of the trainer", method, arguments)

    # -- diagnostics --------------------------------------------------------------------------------------------------

    def is_alive(self) -> bool:
        """See `PolicyWorker.is_alive`."""
        return True

    def get_info(self) -> WorkerInfo:
        """See `PolicyWorker.get_info`."""
        return self.reporting.info()

    def get_gpu_info(self) -> dict[str, Any]:
        """See `PolicyWorker.get_gpu_info`."""
        return self.reporting.gpu_info()

    def report_device_id(self) -> str:
        """See `PolicyWorker.report_device_id`."""
        return self.reporting.device_id()

    def reset_peak_memory_stats(self) -> None:
        """See `PolicyWorker.reset_peak_memory_stats`."""
        self.reporting.reset_peak_memory()

    def start_profiling(
        self,
        ranks: tuple[int, ...] | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
        memory: bool = False,
    ) -> None:
        """See `PolicyWorker.start_profiling`."""
        self.reporting.start_profiling(ranks, with_stack=with_stack, record_shapes=record_shapes, memory=memory)

    def stop_profiling(self, folder: str | None) -> str | None:
        """See `PolicyWorker.stop_profiling`."""
        return self.reporting.stop_profiling(folder)

    def start_gpu_profiling(self) -> None:
        """See `PolicyWorker.start_gpu_profiling`."""
        self.reporting.start_gpu_profiling()

    def stop_gpu_profiling(self) -> None:
        """See `PolicyWorker.stop_gpu_profiling`."""
        self.reporting.stop_gpu_profiling()

    def shutdown(self) -> None:
        """See `PolicyWorker.shutdown`."""
        self.generation.close()
        self.scoring.reference = None
        self.reporting.stop_profiling(None)
        self.checkpoints.abandon()
        self.sender.close()
        self.engine.close()
