"""The part of a policy worker that does not depend on the engine.

Global batches, microbatches and dummies, loss normalization, metrics, the embedded generation engine, the schedule, and
the handling of non-finite gradients. An engine derives from `PolicyWorkerBase` and supplies the primitives of
`engine.py`. Log-probabilities and the reference swap are in `scoring.py`, checkpoints in `checkpoint_io.py`, reports in
`reporting.py`, offloading in `residency.py`, weight sync in `weight_sender.py`.
"""

from __future__ import annotations

import time
from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.collectives import max_over_ranks
from rlframework.batch.packed_tensor import has_media
from rlframework.batch.packing.lengths import round_up
from rlframework.config.base import Section
from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import GenerationConfig
from rlframework.errors import BatchError, NonFiniteGradients, NotSupported
from rlframework.interfaces.data_processor import BatchPlan, DataProcessor, Microbatch
from rlframework.interfaces.loss import LossFunction, LossInput, LossType
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.microbatches.data_processor import make_dummy, to_device
from rlframework.microbatches.row_checks import check_rows
from rlframework.plugins.loading import load_target
from rlframework.policy.checkpoint_io import Saving
from rlframework.policy.head.request import HeadRequest
from rlframework.policy.lora import Adapters
from rlframework.policy.malloc_trim import MallocTrimmer
from rlframework.policy.metrics import average_metrics, reduce_metrics
from rlframework.policy.optimization import learning_rate
from rlframework.policy.profiling import CLIP_AND_STEP, GENERATE, TraceProfiler, trace_span
from rlframework.policy.reporting import Reporting
from rlframework.policy.residency import Memory
from rlframework.policy.scoring import Scoring
from rlframework.policy.step_functions import loss_step, require_results
from rlframework.policy.weight_sender import Refitting


class PolicyWorkerBase(Adapters, Memory, Scoring, Saving, Refitting, Reporting, ABC):
    """A policy worker on the primitives of an engine."""

    backend_config_model: ClassVar[type[Section]] = Section
    """Model of the backend's own configuration section, `policy.<backend>`."""

    def __init__(
        self,
        config: PolicyConfig | Mapping[str, Any],
        tokenizer: Any,
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
        self.config = config if isinstance(config, PolicyConfig) else PolicyConfig.model_validate(dict(config))
        self.tokenizer = tokenizer
        self.context = context or WorkerContext()
        self.backend_config = self.backend_config_model.model_validate(backend_config or {})
        # a worker sees only its own GPU, as device 0
        self.device = torch.device("cuda", 0) if self.context.device == "cuda" else torch.device(self.context.device)
        self._generation_config = generation or GenerationConfig()
        self._processor: DataProcessor = load_target(processor_target)()
        self._train_calls = 0
        self._skipped_in_a_row = 0
        self._weights_version = 0
        self._generation_version = -1
        self._offloaded: set[str] = set()
        self._malloc_trimmer = MallocTrimmer()
        self._profiler = TraceProfiler()
        # cheap, and before the model is built: bad settings are reported first
        self._generation_engine = self._make_generation_engine(generation_target) if generation_target else None
        if self.context.threads:
            torch.set_num_threads(self.context.threads)
        self.build(init_optimizer=init_optimizer)
        self._has_optimizer = init_optimizer
        self._init_reference_model = init_reference_model
        keeps_copy = init_reference_model and self.config.lora is None  # with adapters the base itself is the reference
        self._reference = self.snapshot() if keeps_copy else None  # before a checkpoint is loaded
        if weights_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

    # -- training -----------------------------------------------------------------------------------------------------

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """See `PolicyWorker.train`."""
        self._require_head("language", "train")
        if not eval_mode and not self._has_optimizer:
            raise NotSupported("this worker was built without an optimizer; build it with init_optimizer=True to train")
        self._check_training_data(data, loss_fn)
        self._onload("model", *([] if eval_mode else ["optimizer"]))
        rows, count = self._global_batches(data, gbs or self.config.train_global_batch_size)
        lr = learning_rate(self.config.optimizer.lr, self.config.scheduler, self._train_calls)
        started = time.perf_counter()
        batches = [self._global_batch(data, index, rows, loss_fn, mbs, lr, eval_mode) for index in range(count)]
        if not eval_mode:
            self._train_calls += 1
            if self.config.offload.optimizer:
                self._offload("optimizer")
        self._malloc_trimmer.trim()
        return self._summary(batches, lr, time.perf_counter() - started)

    def _check_training_data(self, data: BatchedDataDict[Any], loss_fn: LossFunction) -> None:
        check_rows(data)
        if "sample_mask" not in data:
            raise BatchError(f"sample_mask must be present in the data! It has {sorted(data)}")
        if "token_mask" not in data:
            kind = "token-level loss" if loss_fn.loss_type == LossType.TOKEN_LEVEL else "training"
            raise BatchError(f"token_mask must be present in the data when using {kind}; it has {sorted(data)}")

    def _global_batches(self, data: BatchedDataDict[Any], global_batch_size: int) -> tuple[int | None, int]:
        """This rank's rows per global batch (None: as planned by the driver), and the number of global batches."""
        if data.elem_counts_per_gb is not None:
            return None, len(data.elem_counts_per_gb)
        ranks = self.data_parallel_size()
        if global_batch_size < 1:
            raise BatchError(f"gbs is {global_batch_size}; it must be at least 1")
        local, remainder = divmod(global_batch_size, ranks)
        if remainder:
            raise BatchError(
                f"a global batch of {global_batch_size} rows does not divide over {ranks} data-parallel workers"
            )
        if data.size == 0 or data.size % local:
            raise BatchError(
                f"this worker got {data.size} rows, not a multiple of {local}, its share of a global batch of "
                f"{global_batch_size} rows over {ranks} data-parallel workers"
            )
        return local, data.size // local

    def _global_batch(
        self,
        data: BatchedDataDict[Any],
        index: int,
        rows: int | None,
        loss_fn: LossFunction,
        mbs: int | None,
        lr: float,
        eval_mode: bool,
    ) -> dict[str, Any]:
        processed = self._processor.process_global_batch(
            data, loss_fn, self.data_parallel_group(), batch_idx=index, batch_size=rows
        )
        batch: BatchedDataDict[Any] = processed["batch"]
        global_valid_seqs, global_valid_toks = (
            processed[name].to(self.device) for name in ("global_valid_seqs", "global_valid_toks")
        )
        counts = {"global_valid_seqs": float(global_valid_seqs), "global_valid_toks": float(global_valid_toks)}
        if not counts["global_valid_toks"]:  # on any rank: skip the step, which would only follow momentum
            return {"loss": 0.0, "grad_norm": None if eval_mode else 0.0, "skipped": 0, "metrics": {}, **counts}
        head = self._head_request(loss_fn)
        microbatches = self._microbatches(
            batch, "loss", mbs or self.config.train_micro_batch_size, self.config.batching.tokens
        )
        results = self.forward_backward(
            microbatches, head, loss_step(loss_fn, global_valid_seqs, global_valid_toks), forward_only=eval_mode
        )
        require_results(results, microbatches)
        metrics = reduce_metrics([result.outputs for result in results], self.data_parallel_group(), self.device)
        norm, skipped = None, False
        if not eval_mode:
            with trace_span(CLIP_AND_STEP):
                norm, skipped = self.clip_and_step(self.config.max_grad_norm, lr)
            self._after_step(norm, skipped)
        return {
            "loss": metrics.pop("loss"),
            "grad_norm": norm,
            "skipped": int(skipped),
            "metrics": metrics,
            **counts,
        }

    def _head_request(self, loss_fn: LossFunction) -> HeadRequest:
        wants = {"logits"} if loss_fn.input_type == LossInput.LOGITS else {"logprobs"}
        if loss_fn.wants_entropy:
            wants.add("entropy")
        return HeadRequest(frozenset(wants), self._temperature() if loss_fn.at_sampling_temperature else 1.0)

    def _temperature(self) -> float:
        return self._generation_config.temperature or 1.0  # greedy samples are scored at temperature 1

    def _after_step(self, norm: float | None, skipped: bool) -> None:
        self._weights_version += not skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row >= self.config.non_finite_gradients.stop_after:
            raise NonFiniteGradients(
                f"the gradient was not finite (norm {norm}) for {self._skipped_in_a_row} consecutive steps; the "
                f"weights are those from before the first of them. Lower policy.optimizer.lr, set "
                f"policy.max_grad_norm, or use policy.precision=float32; "
                f"policy.non_finite_gradients.stop_after sets how many are tolerated"
            )

    def _summary(self, batches: list[dict[str, Any]], lr: float, seconds: float) -> dict[str, Any]:
        norms = [batch["grad_norm"] for batch in batches]
        return {
            "global_loss": torch.tensor([batch["loss"] for batch in batches]),
            "grad_norm": None if norms[0] is None else torch.tensor(norms),
            "metrics": average_metrics([batch["metrics"] for batch in batches if batch["metrics"]]),
            "lr": lr,
            "skipped": sum(batch["skipped"] for batch in batches),
            "global_valid_seqs": sum(batch["global_valid_seqs"] for batch in batches),
            "global_valid_toks": sum(batch["global_valid_toks"] for batch in batches),
            "rank": self.context.rank,
            "times": {"train": seconds},
        }

    # -- microbatches -------------------------------------------------------------------------------------------------

    def _microbatches(
        self, data: BatchedDataDict[Any], positions: str, rows: int, tokens: int | None
    ) -> list[Microbatch]:
        """This rank's microbatches, plus dummies up to the count that all ranks and the engine's rule require."""
        rule = self.microbatch_rule()
        longest = round_up(int(data["input_lengths"].max()), rule.pad_multiple)
        tokens = tokens or max(self.preferred_tokens(), longest)
        plan = BatchPlan(self._batching_mode(data), rows, tokens)
        microbatches = list(self._processor.microbatches(data, plan, rule, positions=positions, device=self.device))
        most = int(max_over_ranks(torch.tensor(len(microbatches)), self.data_parallel_group()))
        count = max(most, rule.count_minimum)
        count += -count % rule.count_multiple
        missing = count - len(microbatches)
        if not missing:
            return microbatches
        dummy = make_dummy(data, packed=plan.mode == "packed", pad_multiple=rule.pad_multiple)
        return microbatches + [to_device(dummy, self.device)] * missing

    def _batching_mode(self, data: BatchedDataDict[Any] | None = None) -> str:
        """See `Reporting._batching_mode`. With `data`, `auto` does not choose packing for multimodal rows."""
        mode = self.config.batching.mode
        if mode != "auto":
            return mode
        preferred = self.preferred_batching()
        return "dynamic" if preferred == "packed" and data is not None and has_media(data) else preferred

    # -- generation ---------------------------------------------------------------------------------------------------

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """See `PolicyWorker.generate`."""
        self._require_head("language", "generate")
        self._onload("model")
        engine = self._embedded_engine()
        with self.generating(), trace_span(GENERATE):
            output: BatchedDataDict[Any] = engine.generate(data, greedy=greedy)
        return output

    def _embedded_engine(self) -> Any:
        """The engine with current weights: the live module if this rank has it whole, otherwise an updated copy."""
        if self._generation_engine is None:
            raise NotSupported("this worker was built without a generation engine; set generation_target")
        module = self.whole_model()
        if self._generation_version != self._weights_version:
            if module is not None:
                self._generation_engine.attach(module)
            else:
                self._generation_engine.load_weights(self.gather_weights(self.weight_specs()))
            self._generation_version = self._weights_version
        return self._generation_engine

    def _make_generation_engine(self, target: str) -> Any:
        engine_class: Callable[..., Any] = load_target(target)
        return engine_class(
            self._generation_config,
            self.tokenizer,
            model_name=self.config.model_name,
            device=str(self.device),
            precision=self.config.precision,
        )

    def finish_generation(self) -> bool:
        """See `PolicyWorker.finish_generation`."""
        return bool(self._generation_engine.finish_generation()) if self._generation_engine is not None else True

    # -- shutdown -----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """See `PolicyWorker.shutdown`."""
        self._generation_engine = self._reference = None
        self._profiler.stop(None)
        self.abandon_checkpoint()
        self.close()
