"""Training: global batches, loss normalization, metrics, the schedule, and non-finite gradients."""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from rlframework.base.errors import BatchError, NonFiniteGradients, NotSupported
from rlframework.batch.batch_rows import copy_to
from rlframework.huggingface.model_directories import text_config
from rlframework.interfaces.loss import (
    TOKEN_SETS,
    LossFunction,
    LossInput,
    head_of,
    loss_positions,
    needs_groups,
)
from rlframework.interfaces.policy_worker import Rows, SampledDifference, SamplingBound, TrainResult
from rlframework.policy.engine import Engine, require_head_of
from rlframework.policy.flops import ModelFlops
from rlframework.policy.head.patch import HeadRequest
from rlframework.policy.microbatches.global_batch import rows_with_targets
from rlframework.policy.microbatches.model_inputs import with_token_sets
from rlframework.policy.microbatching import (
    Microbatching,
    SampledTokensCheck,
    average_metrics,
    loss_step,
    reduce_metrics,
    require_results,
)
from rlframework.policy.optimization import learning_rate
from rlframework.policy.profiling import CLIP_AND_STEP, trace_span
from rlframework.policy.shared_state import DeviceMemory, Residency, TrainingProgress

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


class MallocTrimmer:
    """Returns freed memory to the operating system, at most once per `min_interval` seconds, because it costs a little.

    On a CPU, tensors are blocks of the C library's heap. Microbatches differ in length, so freed blocks rarely fit new
    ones, and the heap keeps growing: a model of 12 million parameters on GSM8K grew from 1.0 to 2.3 GB in five steps,
    of which 1.1 GB were free. Only glibc can trim the heap; elsewhere this does nothing.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, min_interval: float = 10.0) -> None:
        self._clock, self._min_interval = clock, min_interval
        self._last = clock()

    def trim(self) -> bool:
        """Trim the heap if `min_interval` seconds have passed; return whether it was trimmed."""
        now = self._clock()
        if _malloc_trim is None or now - self._last < self._min_interval:
            return False
        self._last = now
        _malloc_trim(0)
        return True


@dataclass(frozen=True)
class GlobalBatchResult:
    """The result of one global batch over all ranks. `grad_norm` is None in evaluation."""

    loss: float
    grad_norm: float | None
    skipped: bool
    metrics: dict[str, float]
    global_valid_seqs: float
    global_valid_toks: float
    sampled: SampledDifference | None = None

    @property
    def withheld(self) -> bool:
        """Whether the step was not taken because its tokens are not what the engine says."""
        return self.sampled is not None and self.sampled.withheld


@dataclass
class Training:
    """Trains and evaluates an engine on global batches; some losses score tokens at the sampling temperature."""

    engine: Engine
    microbatching: Microbatching
    residency: Residency
    progress: TrainingProgress
    memory: DeviceMemory
    temperature: float
    has_optimizer: bool
    malloc_trimmer: MallocTrimmer = field(default_factory=MallocTrimmer)

    def train(
        self,
        data: Rows,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        sampling_bound: SamplingBound | None = None,
    ) -> TrainResult:
        """See `PolicyWorker.train`."""
        require_head_of(self.engine.config, loss_fn)
        if not eval_mode and not self.has_optimizer:
            raise NotSupported("this worker was built without an optimizer; build it with init_optimizer=True to train")
        if not eval_mode:
            self.residency.require_policy("train")
        config = self.engine.config
        with self.memory.during("training"):
            self.residency.onload(*(("model",) if eval_mode else ("model", "optimizer")))
            self.memory.training_begins()
            rows, count = self.global_batches(data, gbs or config.train_global_batch_size)
            lr = learning_rate(config.optimizer.lr, config.scheduler, self.progress.train_calls)
            mbs = mbs or config.train_micro_batch_size
            started = time.perf_counter()
            results: list[GlobalBatchResult] = []
            while len(results) < count and not (results and results[-1].withheld):
                step_lr = None if eval_mode else lr
                results.append(self.global_batch(data, len(results), rows, loss_fn, mbs, step_lr, sampling_bound))
            if not eval_mode:
                self.progress.train_calls += 1
                if config.offload.optimizer:
                    self.residency.offload("optimizer")
        self.malloc_trimmer.trim()
        result = self.summary(results, lr, time.perf_counter() - started)
        if self._model_flops is None:
            return result
        return {**result, "flops": self.flops(data, loss_positions(loss_fn), evaluating=eval_mode)}

    @cached_property
    def _model_flops(self) -> ModelFlops | None:
        engine, config = self.engine, self.engine.config
        try:
            weights = {name: spec.shape for name, spec in engine.weight_specs().items()}
        except NotImplementedError:  # an engine that is being written trains before it can name its weights
            return None
        adapters = None if config.lora is None else [spec.shape for spec in engine.adapter_specs().values()]
        return ModelFlops.of(weights, text_config(config.model_name, config.trust_remote_code), adapters)

    def flops(self, data: Rows, positions: str, *, evaluating: bool) -> float:
        """The FLOPs that the model needs for the rows of `data` that have one of the `positions` of the loss."""
        assert self._model_flops is not None
        rows = rows_with_targets(data, positions)
        if positions == "loss":
            head_positions = float((data["token_mask"][:, 1:] != 0).sum(1)[rows].sum())
        else:
            head_positions = float(rows.sum())
        count = self._model_flops.forward if evaluating else self._model_flops.training
        return count(data["input_lengths"][rows], head_positions)

    def global_batches(self, data: Rows, global_batch_size: int) -> tuple[int | None, int]:
        """Return this rank's rows per global batch (None: as planned by the driver), and the number of them."""
        if data.elem_counts_per_gb is not None:
            return None, len(data.elem_counts_per_gb)
        ranks = self.engine.data_parallel_size()
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

    def global_batch(
        self,
        data: Rows,
        index: int,
        rows: int | None,
        loss_fn: LossFunction,
        mbs: int,
        lr: float | None,
        sampling_bound: SamplingBound | None = None,
    ) -> GlobalBatchResult:
        """Run global batch `index`, of `rows` rows of this rank, and take a step at `lr` (None: only evaluate)."""
        engine = self.engine
        processed = self.microbatching.global_batch(data, loss_fn, index, rows)
        given = processed["global_valid_seqs"], processed["global_valid_toks"]
        counts = float(given[0]), float(given[1])  # before they are on the device, where reading them would wait for it
        positions = loss_positions(loss_fn)
        if not counts[positions == "loss"]:  # on any rank: skip the step, which would only follow momentum
            return GlobalBatchResult(0.0, None if lr is None else 0.0, False, {}, *counts)
        tokens, groups = engine.config.batching.tokens, needs_groups(loss_fn)
        head = self.head_request(loss_fn)
        microbatches = self.microbatching.split(processed["batch"], positions, mbs, tokens, groups)
        if head.token_sets is not None:
            microbatches = with_token_sets(microbatches, head.token_sets, engine.device)
        check = SampledTokensCheck.of(
            sampling_bound, data, loss_fn, same_temperature=head.temperature == self.temperature
        )
        seqs, toks = (copy_to(count, engine.device) for count in given)
        step = loss_step(loss_fn, seqs, toks, check)
        results = engine.forward_backward(microbatches, head, step, forward_only=lr is None)
        require_results(results, microbatches)
        pending = reduce_metrics([result.outputs for result in results], engine.data_parallel_group(), engine.device)
        norm, skipped, sampled = None, False, None
        if check is not None:  # all ranks have the same sums, so all take the step or none
            metrics = pending.read()
            sampled = check.of_batch(metrics)
            if sampled.withheld:
                norm = None if lr is None else math.nan
                return GlobalBatchResult(metrics.pop("loss"), norm, False, metrics, *counts, sampled)
        if lr is not None:
            with trace_span(CLIP_AND_STEP), self.memory.during_optimizer_step():
                norm, skipped = engine.clip_and_step(engine.config.max_grad_norm, lr)
            self.after_step(norm, skipped)
        if check is None:
            metrics = pending.read()  # arrived while the norm was waited for
        return GlobalBatchResult(metrics.pop("loss"), norm, skipped, metrics, *counts, sampled)

    def head_request(self, loss_fn: LossFunction) -> HeadRequest:
        """Return what `loss_fn` needs from the head."""
        if head_of(loss_fn) != "language":
            return HeadRequest(frozenset({"scores"}))
        wants = {"logits"} if loss_fn.input_type == LossInput.LOGITS else {"logprobs"}
        if loss_fn.wants_entropy:
            wants.add("entropy")
        temperature = self.temperature if loss_fn.at_sampling_temperature else 1.0
        sets = TOKEN_SETS if loss_fn.input_type == LossInput.TOKEN_SETS else None
        gradient = getattr(loss_fn, "entropy_gradient", False)
        return HeadRequest(frozenset(wants), temperature, token_sets=sets, entropy_gradient=gradient)

    def after_step(self, norm: float, skipped: bool) -> None:
        """Count the step; raise `NonFiniteGradients` after too many skipped ones."""
        self.progress.weights_version += not skipped
        self.progress.skipped_in_a_row = self.progress.skipped_in_a_row + 1 if skipped else 0
        if self.progress.skipped_in_a_row >= self.engine.config.non_finite_gradients.stop_after:
            raise NonFiniteGradients(
                f"the gradient was not finite (norm {norm}) for {self.progress.skipped_in_a_row} consecutive steps; "
                f"the weights are those from before the first of them. Lower policy.optimizer.lr, set "
                f"policy.max_grad_norm, or use policy.precision=float32; "
                f"policy.non_finite_gradients.stop_after sets how many are tolerated"
            )

    def summary(self, results: list[GlobalBatchResult], lr: float, seconds: float) -> TrainResult:
        """Return the result of a call."""
        norms = [result.grad_norm for result in results]
        waited = {"device_wait": wait} if (wait := self.engine.waits.pop()) and self.engine.device.type != "cpu" else {}
        compared = [result.sampled for result in results if result.sampled is not None]
        result: TrainResult = {
            "global_loss": torch.tensor([result.loss for result in results]),
            "grad_norm": None if norms[0] is None else torch.tensor(norms),
            "metrics": average_metrics([result.metrics for result in results if result.metrics]),
            "lr": lr,
            "skipped": sum(result.skipped for result in results),
            "global_valid_seqs": sum(result.global_valid_seqs for result in results),
            "global_valid_toks": sum(result.global_valid_toks for result in results),
            "rank": self.engine.context.rank,
            "times": {"train": seconds, **waited},
        }
        if compared:
            worst = max(compared, key=lambda each: (each.withheld, each.mean))
            result["sampled"] = worst._replace(largest=max(each.largest for each in compared))
        return result
