"""The policy-worker interface: one process of the model being trained.

Names follow NeMo-RL's workers. `rlframework.policy.worker.PolicyWorkerBase` implements everything that does not depend
on the engine, around the primitives of a backend's `rlframework.policy.engine.Engine`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypeAlias, TypedDict

from rlframework.base.errors import NotSupported, RefitError, UserError
from rlframework.base.logs import debug_span
from rlframework.interfaces.worker_group import sharded

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.interfaces.generation import GenerationRequest, Incoming
    from rlframework.interfaces.loss import LossFunction

_LOG = logging.getLogger(__name__)

Rows: TypeAlias = "BatchedDataDict[Any]"


SAMPLED_NOW = "sampled_now"
"""The column `[B, S]` of a batch that is nonzero for tokens that were sampled with the weights that are trained now.

Without it, all were.
"""


class SamplingBound(NamedTuple):
    """The most that the engine's log-probabilities of sampled tokens may differ from the policy's, in nats.

    `mean`: over the tokens of a global batch; `largest`: of each. Infinity: no bound.
    """

    mean: float
    largest: float


class SampledDifference(NamedTuple):
    """How much the engine's log-probabilities of a global batch differ from the policy's, over `tokens` tokens.

    `withheld`: whether that is beyond the bound, so that the optimizer step was not taken.
    """

    mean: float
    largest: float
    tokens: float
    withheld: bool


class TrainResult(TypedDict):
    """The result of `PolicyWorker.train`, and of `Policy.train`, which adds `loss`, the mean of `global_loss`.

    - `global_loss`: CPU tensor, one value per global batch, the same on all ranks;
    - `grad_norm`: CPU tensor, one value per global batch, before clipping; None in eval mode;
    - `metrics`: the loss's metrics over all ranks, averaged over global batches. Within a global batch, metrics whose
      names end in `_min` or `_max` are reduced to the extreme over microbatches and ranks, all others to the sum;
    - `skipped`: the number of steps skipped for a non-finite gradient;
    - `sampled`: with `sampling_bound`, the largest difference of a global batch; absent if none was compared;
    - `times`: seconds by phase: `train`, and `device_wait`, in which the host waited for a GPU. `Policy.train` has the
      longest of the workers;
    - `flops`: FLOPs that the model needs for this rank's rows (`rlframework.policy.flops`), of `Policy.train` for all
      rows; absent if the sizes of the model are unknown.
    """

    loss: NotRequired[float]
    global_loss: Tensor
    grad_norm: Tensor | None
    metrics: dict[str, float]
    lr: float
    skipped: int
    global_valid_seqs: float
    global_valid_toks: float
    rank: int
    times: dict[str, float]
    flops: NotRequired[float]
    sampled: NotRequired[SampledDifference]


class Attempt(NamedTuple):
    """The outcome of a call that may fail: its `result`, or the message of its `error` and whether the user made it."""

    result: Any
    error: str = ""
    user_error: bool = False


class BytesMoved(TypedDict):
    """Bytes that a transition moved between the device and CPU memory."""

    model: int
    optimizer: int


class WorkerInfo(TypedDict):
    """A worker's description of itself; `versions` are those of the engine's packages.

    `memory_bytes` now and `peak_memory_bytes` since the worker was built or `reset_peak_memory_stats`, on a CPU of the
    whole process. The driver plans microbatches for all ranks from `batching` (padded, dynamic or packed; default
    padded), `preferred_tokens` (tokens of a microbatch if the configuration sets none), `pad_multiple`, `few_shapes`
    and `packs_media`, as in `MicrobatchRule`. `peak_reserved_bytes`: peak of the memory that torch's allocator holds.
    `peak_bytes_by_phase`: on a GPU, peaks in training, scoring, generation, refit and other. `bytes_by_part`: on a GPU,
    weights, optimizer and gradients at the last optimizer step, and activations, which are the rest of the peak in
    training.
    """

    rank: int
    pid: int
    device: str
    memory_bytes: int
    threads: int
    versions: dict[str, str]
    world_size: NotRequired[int]
    device_name: NotRequired[str]
    peak_memory_bytes: NotRequired[int]
    peak_reserved_bytes: NotRequired[int]
    peak_bytes_by_phase: NotRequired[Mapping[str, int]]
    bytes_by_part: NotRequired[Mapping[str, int]]
    batching: NotRequired[str]
    preferred_tokens: NotRequired[int]
    pad_multiple: NotRequired[int]
    few_shapes: NotRequired[bool]
    packs_media: NotRequired[bool]


class RefitState(TypedDict):
    """A worker's state before a refit: changes of the weights so far, the device for IPC, and whether the group of
    `init_collective` is open.
    """

    version: int
    device: str
    joined: bool


def _undeclared(worker: PolicyWorker, what: str, capability: str) -> NotSupported:
    return NotSupported(
        f"{type(worker).__name__} does not {what}: its backend does not declare {capability}; choose a policy.backend "
        "that does (see `rlframework plugins`)"
    )


class PolicyWorker(ABC):
    """One worker of a policy. Every method is called on all workers of the group at the same time.

    Constructed with the keyword arguments of `PolicyWorkerBase`: `config` (the backend-neutral keys), `tokenizer`,
    `backend_config` (the backend's own section), `context`, `init_optimizer`, `init_reference_model`, `generation` and
    `generation_target` (None if the worker will not be asked to generate), `processor_target`. Raises `UserError` for a
    model that cannot be loaded; never falls back to freshly initialized weights.

    Batches are right-padded, and dimension 1 is the sequence: `input_ids [B, S]` int64, `input_lengths [B]` int64,
    `token_mask [B, S]` and `sample_mask [B]` from 0 to 1. The driver has checked the values. Each data-parallel rank
    gets its own rows. Results are on the CPU, in the order of the rows. Methods whose capability the backend does not
    declare raise `NotSupported`.
    """

    @sharded
    @abstractmethod
    def train(
        self,
        data: Rows,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        sampling_bound: SamplingBound | None = None,
    ) -> TrainResult:
        """Take one optimizer step for each global batch of `gbs` rows over all ranks; with `eval_mode`, only evaluate.

        Evaluation changes no state. Each worker independently raises `BatchError` for a batch without masks or with
        rows that do not divide into global batches. A global batch without valid tokens takes no step. One with a
        non-finite gradient is skipped; `non_finite_gradients.stop_after` skips in a row raise `NonFiniteGradients`.
        Losses with `wants_entropy` find `entropy` in their data. For losses with `needs_groups`, each rank's rows of
        a global batch must be whole groups, as `Policy.train` shards them.

        With `sampling_bound`, the policy's log-probabilities of sampled tokens (`prev_logprobs`, or those of the loss)
        are compared with `generation_logprobs`, where the batch has them and the loss reads log-probabilities at the
        sampling temperature. A global batch that is beyond the bound takes no step, and the call ends with it.
        """

    @sharded
    @abstractmethod
    def get_logprobs(
        self, data: Rows, micro_batch_size: int | None = None, positions: str = "all", entropy: bool = False
    ) -> Rows:
        """Return `logprobs [B, S]` fp32: entry i is log p(token i | tokens before i); 0 at position 0 and at padding.

        With `entropy`, also return `entropy [B, S]` fp32 in nats, of the distribution that token i was drawn from. The
        temperature is `generation.temperature`, at which samples are drawn (1 if that is 0, for greedy decoding).
        With `positions="token_mask"` only positions with nonzero `token_mask` are scored, with `"loss"` only those of
        them in rows with nonzero `sample_mask`; the others are 0.
        """

    @sharded
    @abstractmethod
    def get_topk_logits(self, data: Rows, k: int, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """Return `topk_logits [B, S, k]` fp32, largest first, and their token ids, `topk_indices [B, S, k]` int64.

        Also return `topk_normalizers [B, S]` fp32, the logsumexp of all logits: log-probabilities are the difference.
        Entry i belongs to the distribution that token i was drawn from, so logits have the temperature of
        `get_logprobs`. Entries are 0 at position 0, at padding, and where `positions` excludes them.
        """

    @sharded
    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: Rows, micro_batch_size: int | None = None, positions: str = "all"
    ) -> Rows:
        """Return `reference_logprobs [B, S]`: like `get_logprobs`, with the weights of the reference.

        They are those that the worker was built with, until `sync_reference` changes them.
        """

    @abstractmethod
    def use_reference_model(self) -> AbstractContextManager[None]:
        """Context manager: swap in the reference weights; restore the policy's on exit, also after an exception."""

    @abstractmethod
    def exchange(
        self, requests: Sequence[GenerationRequest], abort_ids: Collection[str], timeout: float | None
    ) -> Incoming:
        """Abort and submit requests of the embedded engine, then serve for at most `timeout` seconds.

        None: until all have finished.
        Called on all ranks, because gathering the weights of a sharded model is collective; only the first rank of each
        replica gets requests. Results that are not returned now are returned by a later call.
        """

    @abstractmethod
    def finish_generation(self) -> bool:
        """Free memory that the embedded engine does not need between rollouts; return True when done."""

    @abstractmethod
    def save_pretrained(self, path: str) -> None:
        """Write fp32 weights, configuration and tokenizer as a Hugging Face directory, atomically, or `WriteError`."""

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> BytesMoved:
        """Onload model and optimizer to the device; called before `train`.

        Transitions never change results, in any order of calls; a call that needs offloaded state onloads it.
        """

    @abstractmethod
    def prepare_for_lp_inference(self) -> BytesMoved:
        """Onload the model and, with `policy.offload.optimizer`, offload the optimizer; called before scoring."""

    @abstractmethod
    def is_alive(self) -> bool:
        """Return True, which shows that the worker responds."""

    @abstractmethod
    def get_info(self) -> WorkerInfo:
        """Describe the worker."""

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the process group; free the model."""

    # Optional for a backend: each method raises `NotSupported` unless the backend declares its capability.

    def get_gpu_info(self) -> dict[str, Any]:
        """Describe the hardware this worker runs on, for people to read.

        `rank`, `world_size`, `local_rank`, `local_device_id` (None on a CPU), `global_device_id` (`report_device_id`),
        `device_count`, `device_name`; in MiB `memory_allocated_mb`, `memory_reserved_mb`, `peak_memory_allocated_mb`,
        `peak_memory_reserved_mb` (on a CPU the process's resident memory, for both); `parameter_sample`: name, device,
        shape and dtype of one weight; `env_vars`: the values of CUDA*, LOCAL_RANK, RANK and WORLD_SIZE.
        """
        raise NotSupported(f"{type(self).__name__} does not describe its device")

    def report_device_id(self) -> str:
        """Return `GPU-` and NVML's UUID of the GPU; for a CPU worker, a name that is unique to its process."""
        raise NotSupported(f"{type(self).__name__} does not report its device id")

    def reset_peak_memory_stats(self) -> None:
        """Restart the measurement of peak memory. Does nothing if the worker or its system does not measure it."""

    def start_profiling(
        self,
        ranks: tuple[int, ...] | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
        memory: bool = False,
    ) -> None:
        """Start recording every operation on these `ranks` (None: all) with the torch profiler.

        `with_stack` also records the source line of each operation, `record_shapes` the shapes of its arguments, and
        `memory` what it allocates and frees.
        """
        raise NotSupported(f"{type(self).__name__} has no profiler")

    def stop_profiling(self, folder: str | None) -> str | None:
        """Stop recording, write the trace to `folder`/rank-N.json.gz (None: discard it), return its path, if any."""
        raise NotSupported(f"{type(self).__name__} has no profiler")

    def start_gpu_profiling(self) -> None:
        """Begin a range of the CUDA profiler (`nsys --capture-range=cudaProfilerApi`); requires a GPU."""
        raise NotSupported(f"{type(self).__name__} has no profiler")

    def stop_gpu_profiling(self) -> None:
        """End the range that `start_gpu_profiling` began."""
        raise NotSupported(f"{type(self).__name__} has no profiler")

    def offload_before_refit(self) -> BytesMoved:
        """Offload the optimizer to CPU memory, to make room for a generation engine on the same device."""
        raise _undeclared(self, "offload its optimizer", "cpu_offload")

    def offload_after_refit(self) -> BytesMoved:
        """Offload model and optimizer to CPU memory."""
        raise _undeclared(self, "offload its model", "cpu_offload")

    def sync_reference(self, alpha: float) -> None:
        """Change the weights of the reference to `alpha` times the policy's plus `1 - alpha` times its own, in fp32.

        The policy does not change. Capability `reference_model`; `NotSupported` for a worker with adapters, whose
        reference is their base, or one that was built without a reference.
        """
        raise _undeclared(self, "change its reference", "reference_model")

    @sharded
    def get_token_set_logprobs(self, data: Rows, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """Return `set_logprobs [B, S, K]` fp32 of the tokens `data["token_sets"] [B, S, K]`.

        Entry i belongs to the distribution that token i was drawn from, as in `get_topk_logits`.
        """
        raise NotSupported(f"{type(self).__name__} does not compute log-probabilities of sets of tokens")

    @sharded
    def score(self, data: Rows, micro_batch_size: int | None = None) -> Rows:
        """Return `scores [B]` fp32: the output of a reward model's head (`policy.head=score`) at each row's last token.

        A row without tokens scores 0. Capability `scoring`. A model loaded with a score head cannot compute
        log-probabilities, and other models cannot score: `NotSupported`.
        """
        raise _undeclared(self, "give scores", "scoring")

    @sharded
    def get_values(self, data: Rows, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """Return `values [B, S]` fp32 of a value head (`policy.head=value`); 0 at position 0 and at padding.

        Entry i is the head's output at token i-1: the value of the state, tokens before i, in which token i was drawn,
        as `logprobs` is aligned. `positions`: see `get_logprobs`. Capability `scoring`; `NotSupported` for models with
        another head.
        """
        raise _undeclared(self, "give values", "scoring")

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        *,
        form: str = "portable",
        asynchronous: bool = False,
        reference_path: str | None = None,
    ) -> None:
        """Write the state that training resumes from; each directory is written atomically.

        Without `optimizer_path`, write weights only. Capability `portable_optimizer_state`. With `form="sharded"`
        (capability `sharded_checkpoints`) each worker writes its own shards; with `asynchronous` the call then returns
        as soon as they are copied, and `finish_checkpoint` must follow. With `form="native"` (capability
        `native_checkpoints`) the checkpoint has the engine's own format. With `reference_path`, also write the weights
        of the reference, which `sync_reference` changes; they are written when the call returns, in the portable form
        unless `form` is "sharded".
        """
        raise _undeclared(self, "save its optimizer", "portable_optimizer_state")

    def checkpoint_written(self) -> bool:
        """Return True if this worker has written its share of the last save and `finish_checkpoint` would not wait."""
        return True

    def finish_checkpoint(self) -> None:
        """Wait for the last save and move it to its final path; if it failed on one worker, raise on every worker.

        The next `save_checkpoint` or `load_checkpoint` does the same. Does nothing if no save is in progress.
        """

    def load_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, reference_path: str | None = None
    ) -> None:
        """Resume from a checkpoint of `save_checkpoint`, in any of its forms. Capability `portable_optimizer_state`.

        Without `optimizer_path` the optimizer keeps its moments and its step, without `reference_path` the reference
        stays as it is.

        Raises `DataError` naming the file, without changing any state, if files are missing, truncated or damaged, or
        if the checkpoint is in the native form of another backend.
        """
        raise _undeclared(self, "load an optimizer", "portable_optimizer_state")

    def save_adapter(self, path: str) -> None:
        """Write the LoRA adapters, fp32, as a directory that peft reads, atomically. Capability `lora`."""
        raise _undeclared(self, "save adapters", "lora")

    def load_adapter(self, path: str) -> None:
        """Load adapters that `save_adapter` or peft wrote for this base model, rank and alpha. Capability `lora`.

        Raises `DataError`, without changing any state, if they do not fit. The optimizer keeps its moments.
        """
        raise _undeclared(self, "load adapters", "lora")

    def get_refit_state(self) -> RefitState:
        """Return the state that the driver needs before a refit. Capabilities `collective_refit`, `ipc_refit`."""
        raise _undeclared(self, "send weights", "collective_refit or ipc_refit")

    def attempt(self, method: str, arguments: Mapping[str, Any]) -> Attempt:
        """Call `method` and return its result, or the message of a `RefitError` or `UserError`.

        An exception would stop the worker group, but a failed refit leaves the trainer intact.
        """
        try:
            with debug_span(_LOG, "attempt of %s", method):
                return Attempt(getattr(self, method)(**arguments))
        except (RefitError, UserError) as error:
            return Attempt(None, str(error), isinstance(error, UserError))

    def reserve_refit_address(self) -> tuple[str, int]:
        """Return this machine's address and a port reserved for `init_collective`. Called on rank 0 only."""
        raise _undeclared(self, "send weights over a process group", "collective_refit")

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Form the process group for refits of engines in other processes. Capability `collective_refit`.

        Only rank 0 joins, as rank 0 of `world_size`, which is 1 plus the number of engines; it listens at `ip` and
        `port`. Raises `RefitError` if the engines do not join within `generation.refit.deadline` seconds.
        """
        raise _undeclared(self, "send weights over a process group", "collective_refit")

    def prepare_info_for_collective(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return name to (shape, dtype) of the weights that either transport sends, in order.

        Names and unsharded shapes are those of `save_pretrained`. Floating-point weights are sent in
        `generation.refit.dtype`, all others unchanged. Capability `collective_refit`.
        """
        raise _undeclared(self, "send weights over a process group", "collective_refit")

    def broadcast_weights_for_collective(self) -> None:
        """Broadcast all weights to the engines in the group, which must be receiving. Capability `collective_refit`.

        Rank 0 raises `RefitError` if an engine is gone, takes longer than `generation.refit.deadline` seconds for a
        group of weights, or detects an error; the other ranks return normally. All ranks stay usable, but if an
        engine was gone or too slow, `init_collective` must be called again.
        """
        raise _undeclared(self, "send weights over a process group", "collective_refit")

    def get_sent_checksums(self) -> Mapping[str, int]:
        """Return the checksum of each weight that this worker sent in the last refit, by name; empty if it sent none.

        Of the bytes as sent: see `rlframework.weight_sync.buffers.checksum`.
        """
        raise _undeclared(self, "send weights", "collective_refit or ipc_refit")

    def prepare_weights_for_ipc(
        self, receive_buffers: Mapping[str, Any] | None = None, devices: Collection[str] | None = None
    ) -> tuple[list[tuple[str, int]], float]:
        """Begin a refit; return the names and bytes of the weights as sent, and the bytes available for one group.

        `receive_buffers`: device id to the result of `offer_refit_memory` of an engine there; weights are then written
        to these buffers. `devices`: the devices of the engines, if they are GPUs; a rank on another one shares nothing.
        Capability `ipc_refit`.
        """
        raise _undeclared(self, "share weights with another process", "ipc_refit")

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return device id to the handles of the named weights, for processes on that device. Capability `ipc_refit`.

        All ranks take part in gathering the weights. On CPUs the first rank of each machine returns the handles and the
        others an empty dictionary. If no engine offered memory, each call overwrites the group of three calls before,
        which must have been read by then. Raises `RefitNotPrepared` unless `prepare_weights_for_ipc` has been called
        for this refit.
        """
        raise _undeclared(self, "share weights with another process", "ipc_refit")
