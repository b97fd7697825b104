"""The driver's handle of a policy: shards batches over the workers and restores the row order of their results."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packing import TokenCost
from rlframework.errors import BatchError, BatchTypeError
from rlframework.huggingface.model_directories import model_sizes
from rlframework.interfaces.named_sharding import policy_sharding
from rlframework.interfaces.policy_worker import BytesMoved, PolicyWorker, WorkerInfo
from rlframework.interfaces.worker_group import WorkerGroup, WorkerSpec
from rlframework.plugins.types import CAPABILITY_OF_FORM, Capability
from rlframework.policy.balancer import BatchBalancer
from rlframework.policy.worker_spec import require, worker_spec
from rlframework.workers.dispatch import WorkerCalls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import RunConfig
    from rlframework.interfaces.loss import LossFunction
    from rlframework.plugins.manager import PluginManager

P = ParamSpec("P")
Rows = BatchedDataDict[Any]


def _require_batch(method: str, data: Any) -> None:
    if not isinstance(data, BatchedDataDict):
        raise BatchTypeError(
            f"{method} takes a BatchedDataDict, not a {type(data).__name__}; wrap it: BatchedDataDict(your_dict)"
        )
    if data.size == 0:
        raise BatchError(f"{method} got no rows")


def _require_positive(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise BatchError(f"{name} is {size}; it must be at least 1, or None for the configured value")


def _total(moved: list[BytesMoved]) -> BytesMoved:
    """Sum over workers."""
    return {"model": sum(each["model"] for each in moved), "optimizer": sum(each["optimizer"] for each in moved)}


class Policy:
    """The driver's handle of the model being trained, on the configured worker group and backend."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        manager: PluginManager,
        *,
        device: str = "cpu",
        init_reference_model: bool = False,
        init_optimizer: bool = True,
        training_calls: int | None = None,
    ) -> None:
        """Start the workers on `device`, "cpu" or "cuda".

        `training_calls`: how often `train` will be called, which the learning-rate schedule spans (default:
        `algorithm.num_steps`). Raises `NotSupported` if the backend does not declare what the run needs.
        """
        record = manager.select("policy_worker", config.policy.backend).record
        if config.policy.head == "score":
            require(record, Capability.SCORING, "policy.head=score requests the scores of a reward model")
        if init_reference_model:
            require(record, Capability.REFERENCE_MODEL, "algorithm.loss.kl_coef requests a reference policy")
        self.config = config
        self.record, self.capabilities = record, record.capabilities
        group = self._choose_group_class(manager.load(manager.select("worker_group", config.worker_group.name).record))
        spec = self._wrap_spec(
            worker_spec(
                config,
                tokenizer,
                manager,
                init_reference_model=init_reference_model,
                init_optimizer=init_optimizer,
                training_calls=training_calls,
            )
        )
        sharding = policy_sharding(config.worker_group.num_workers, config.policy.parallelism)
        self.worker_group: WorkerGroup = group(spec, config.worker_group, sharding=sharding, device=device)
        self._calls = WorkerCalls(self.worker_group)

    def _choose_group_class(self, chosen: type[WorkerGroup]) -> type[WorkerGroup]:
        """Return the class of the worker group; subclasses may replace the configured one."""
        return chosen

    def _wrap_spec(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the specification to start; subclasses may wrap the workers."""
        return spec

    @cached_property
    def _balancer(self) -> BatchBalancer:
        """The balancer, with the workers' own microbatch settings, which are requested once."""
        config = self.config.policy
        info = self.get_info()[0]
        hidden, vocabulary = model_sizes(config.model_name, config.trust_remote_code)
        return BatchBalancer(
            self.data_parallel_size,
            info.get("batching", "padded"),
            info.get("preferred_tokens", 8192),
            TokenCost() if hidden is None else TokenCost.for_hidden_size(hidden),
            info.get("pad_multiple", 1),
            vocabulary,
        )

    @property
    def data_parallel_size(self) -> int:
        """The number of data-parallel ranks, over which batches are sharded."""
        return self.worker_group.sharding.get_axis_size("data_parallel")

    def train(
        self,
        data: Rows,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Take one optimizer step per `gbs` rows of `data` (default: `policy.train_global_batch_size`).

        Returns the result of `PolicyWorker.train` for the whole batch, plus `loss`, the mean over global batches.
        Raises a `BatchError` if the rows do not divide into global batches, or these over the workers.
        """
        _require_batch("train", data)
        gbs = self.config.policy.train_global_batch_size if gbs is None else gbs
        _require_positive(gbs=gbs, mbs=mbs)
        if data.size % gbs:
            raise BatchError(
                f"{data.size} rows do not divide into global batches of {gbs}; pass a multiple of {gbs} rows"
            )
        if gbs % self.data_parallel_size:
            raise BatchError(
                f"a global batch of {gbs} rows does not divide over {self.data_parallel_size} data-parallel workers"
            )
        shards, _ = self._balancer.shard(
            data, batch_size=gbs, positions="loss", tokens=self.config.policy.batching.tokens
        )
        result, *_ = self._calls.on_shards(
            PolicyWorker.train, shards, loss_fn=loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs
        )
        return {**result, "loss": float(result["global_loss"].mean())}

    def get_logprobs(
        self, data: Rows, micro_batch_size: int | None = None, positions: str = "all", entropy: bool = False
    ) -> Rows:
        """Return `logprobs [B, S]`, in row order, and optionally `entropy`: see `PolicyWorker.get_logprobs`."""
        return self._score(
            PolicyWorker.get_logprobs,
            data,
            positions,
            micro_batch_size=micro_batch_size,
            positions=positions,
            entropy=entropy,
        )

    def get_topk_logits(self, data: Rows, k: int, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """Return `topk_logits [B, S, k]` and `topk_indices [B, S, k]`, in order: see `PolicyWorker.get_topk_logits`."""
        _require_positive(k=k)
        return self._score(
            PolicyWorker.get_topk_logits, data, positions, micro_batch_size=micro_batch_size, positions=positions, k=k
        )

    def score(self, data: Rows, micro_batch_size: int | None = None) -> Rows:
        """Return `scores [B]` of a reward model, in order: see `PolicyWorker.score`."""
        require(self.record, Capability.SCORING, "score was called")
        return self._score(PolicyWorker.score, data, "last", micro_batch_size=micro_batch_size)

    def get_reference_policy_logprobs(
        self, data: Rows, micro_batch_size: int | None = None, positions: str = "all"
    ) -> Rows:
        """Return `reference_logprobs [B, S]`: log-probabilities under the weights that the policy started with."""
        return self._score(
            PolicyWorker.get_reference_policy_logprobs,
            data,
            positions,
            micro_batch_size=micro_batch_size,
            positions=positions,
        )

    def _score(
        self,
        method: Callable[Concatenate[Any, Rows, P], Rows],
        data: Rows,
        where: str,
        *args: P.args,
        **options: P.kwargs,
    ) -> Rows:
        """Call `method` on shards of what scoring reads of `data`, and join the results in row order."""
        _require_batch(method.__name__, data)
        sizes: Any = options
        _require_positive(micro_batch_size=sizes["micro_batch_size"])
        rows, ranks = data.size, self.data_parallel_size
        keys = [key for key in ("input_ids", "input_lengths", "token_mask", "sample_mask") if key in data]
        inputs: Rows = BatchedDataDict({key: data[key] for key in keys} | data.get_multimodal_dict())
        if rows % ranks:  # repeat the first rows: every worker needs the same number
            inputs = inputs.select_indices(torch.arange(rows + -rows % ranks) % rows)
        batching = self.config.policy.batching
        shards, order = self._balancer.shard(
            inputs, batch_size=None, positions=where, tokens=batching.logprob_tokens or batching.tokens
        )
        scored: Rows = BatchedDataDict.from_batches(self._calls.on_shards(method, shards, *args, **options))
        if order is not None:
            scored.reorder_data(order)
        return scored.slice(0, rows)

    def save_pretrained(self, path: str) -> None:
        """Write weights, configuration and tokenizer as a Hugging Face directory, atomically."""
        self._calls.on_all(PolicyWorker.save_pretrained, path=path)

    def save_adapter(self, path: str) -> None:
        """Write only the LoRA adapters, as a directory that peft reads, atomically."""
        self._calls.on_all(PolicyWorker.save_adapter, path=path)

    def load_adapter(self, path: str) -> None:
        """Load adapters for the same base, rank and alpha, written by `save_adapter` or peft."""
        self._calls.on_all(PolicyWorker.load_adapter, path=path)

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None, *, form: str = "portable", asynchronous: bool = False
    ) -> None:
        """Write the state that training resumes from; `form`, `asynchronous`: see `PolicyWorker.save_checkpoint`."""
        if form in CAPABILITY_OF_FORM:
            require(self.record, CAPABILITY_OF_FORM[form], f"a {form} checkpoint was requested")
        self._calls.on_all(
            PolicyWorker.save_checkpoint,
            weights_path=weights_path,
            optimizer_path=optimizer_path,
            form=form,
            asynchronous=asynchronous,
        )

    def checkpoint_written(self) -> bool:
        """Return True if all workers have written their shards, so that `finish_checkpoint` does not wait."""
        return all(self._calls.on_all(PolicyWorker.checkpoint_written))

    def finish_checkpoint(self) -> None:
        """Wait for the last save and move it to its final path; raise its error if it failed."""
        self._calls.on_all(PolicyWorker.finish_checkpoint)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Resume from the output of `save_checkpoint`, possibly of another backend or layout."""
        self._calls.on_all(PolicyWorker.load_checkpoint, weights_path=weights_path, optimizer_path=optimizer_path)

    def prepare_for_training(self) -> BytesMoved:
        """Onload model and optimizer; return the bytes moved of each, summed over all workers."""
        return _total(self._calls.on_all(PolicyWorker.prepare_for_training))

    def prepare_for_lp_inference(self) -> BytesMoved:
        """Onload the model for scoring; see `PolicyWorker.prepare_for_lp_inference`."""
        return _total(self._calls.on_all(PolicyWorker.prepare_for_lp_inference))

    def offload_before_refit(self) -> BytesMoved:
        """Offload the optimizer to CPU memory; return the bytes moved, summed over all workers."""
        return _total(self._calls.on_all(PolicyWorker.offload_before_refit))

    def offload_after_refit(self) -> BytesMoved:
        """Offload model and optimizer to CPU memory; return the bytes moved of each, summed over all workers."""
        return _total(self._calls.on_all(PolicyWorker.offload_after_refit))

    def get_info(self) -> list[WorkerInfo]:
        """Return each worker's description of itself, by rank: device, memory, threads, versions."""
        return self._calls.on_all(PolicyWorker.get_info)

    def get_gpu_info(self) -> list[dict[str, Any]]:
        """Return the hardware of each worker, by rank: see `PolicyWorker.get_gpu_info`."""
        return self._calls.on_all(PolicyWorker.get_gpu_info)

    def report_device_ids(self) -> list[str]:
        """Return the device of each worker, by rank: see `PolicyWorker.report_device_id`."""
        return self._calls.on_all(PolicyWorker.report_device_id)

    def reset_peak_memory_stats(self) -> None:
        """Reset the peak memory statistics of each worker."""
        self._calls.on_all(PolicyWorker.reset_peak_memory_stats)

    def start_profiling(
        self,
        ranks: tuple[int, ...] | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
        memory: bool = False,
    ) -> None:
        """Start the torch profiler of the workers: see `PolicyWorker.start_profiling`."""
        self._calls.on_all(
            PolicyWorker.start_profiling,
            ranks=ranks,
            with_stack=with_stack,
            record_shapes=record_shapes,
            memory=memory,
        )

    def stop_profiling(self, folder: str | None) -> list[str]:
        """Write the traces to `folder`, shared by workers and driver, and return their paths, by rank."""
        return [path for path in self._calls.on_all(PolicyWorker.stop_profiling, folder=folder) if path is not None]

    def start_gpu_profiling(self) -> None:
        """Start a range of the CUDA profiler on each worker."""
        self._calls.on_all(PolicyWorker.start_gpu_profiling)

    def stop_gpu_profiling(self) -> None:
        """End the range of the CUDA profiler on each worker."""
        self._calls.on_all(PolicyWorker.stop_gpu_profiling)

    def shutdown(self) -> bool:
        """Stop the workers; return False if one did not shut down cleanly."""
        return self.worker_group.shutdown(cleanup_method="shutdown")

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
