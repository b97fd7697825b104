"""The policy-worker interface: one process of the model that is trained.

Names follow NeMo-RL's workers. `rlframework.policy.worker.PolicyWorkerBase` implements all that does not depend on
the engine; a backend derives from it and supplies the primitives of `rlframework.policy.engine.Engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rlframework.errors import NotSupported

if TYPE_CHECKING:
    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.interfaces.loss import LossFunction


class PolicyWorker(ABC):
    """One worker of a policy. Every method is called on all workers of the group at the same time.

    Made with the keyword arguments of `PolicyWorkerBase`: `config` (the neutral keys), `tokenizer`, `backend_config`
    (its own section), `context`, `init_optimizer`, `init_reference_model`, `generation` and `generation_target` (None:
    it is not asked to generate), `processor_target`. A model that cannot be loaded is a `UserError`, and never one with
    fresh weights in its place.

    Batches are right-padded, dimension 1 is the sequence: `input_ids [B, S]` int64, `input_lengths [B]` int64,
    `token_mask [B, S]` and `sample_mask [B]` of 0 and 1. Each data-parallel rank gets its own rows. Results come back
    on the CPU in the order of the rows. What the backend does not declare raises `NotSupported`.
    """

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One optimizer step for each global batch of `gbs` rows over all ranks; `eval_mode`: none, nothing changes.

        A batch without masks, or rows that do not divide, are a `BatchError` of each worker itself. A global batch
        without a valid token takes no step; one whose gradient is not finite is skipped, and the
        `non_finite_gradients.stop_after`-th in a row is `NonFiniteGradients`. Metrics whose names end in `_min` and
        `_max` are extremes, others sums over microbatches and ranks; losses that want it find `entropy` in their data.

        Returns `global_loss` (CPU tensor, one value a global batch, the same on all ranks), `grad_norm` (CPU tensor,
        one value a global batch, before clipping; None in eval mode), `metrics` (name to float: the loss's metrics over
        all ranks, mean over global batches), `lr`, `skipped` (steps left out for a gradient that was not finite),
        `global_valid_seqs`, `global_valid_toks`, `rank`, `times` (seconds by part).
        """

    @abstractmethod
    def get_logprobs(
        self,
        data: BatchedDataDict[Any],
        micro_batch_size: int | None = None,
        positions: str = "all",
        entropy: bool = False,
    ) -> BatchedDataDict[Any]:
        """`logprobs [B, S]` fp32: entry i is log p(token i | tokens before i); 0 at position 0 and at padding.

        With `entropy`, also `entropy [B, S]` fp32 in nats: entry i is of the distribution that token i was drawn from.

        At the temperature of `generation.temperature`, at which samples are drawn (1 where that is 0, greedy).
        `positions="token_mask"`: only where `token_mask` is not 0; `"loss"`: and in rows whose `sample_mask` is not 0;
        0 elsewhere.
        """

    @abstractmethod
    def get_topk_logits(
        self, data: BatchedDataDict[Any], k: int, micro_batch_size: int | None = None, positions: str = "all"
    ) -> BatchedDataDict[Any]:
        """`topk_logits [B, S, k]` fp32, largest first, and `topk_indices [B, S, k]` int64, the tokens they are of.

        Entry i is of the distribution that token i was drawn from, so logits are at the temperature of `get_logprobs`;
        0 at position 0, at padding, and where `positions` does not ask.
        """

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None, positions: str = "all"
    ) -> BatchedDataDict[Any]:
        """`reference_logprobs [B, S]`: the same under the weights that the worker was built with."""

    @abstractmethod
    def use_reference_model(self) -> AbstractContextManager[None]:
        """Inside, the worker holds the reference weights; afterwards its own again, whatever happened inside."""

    @abstractmethod
    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """Complete this rank's prompts with the embedded engine: see `GenerationEngine.generate`."""

    @abstractmethod
    def finish_generation(self) -> bool:
        """Free what the embedded engine holds between rollouts; True when done."""

    @abstractmethod
    def save_pretrained(self, path: str) -> None:
        """Write weights (fp32 safetensors), configuration and tokenizer as a Hugging Face directory, whole or not.

        Rank 0 writes, all take part. Where it cannot be written: a `UserError`.
        """

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> dict[str, int]:
        """Called before `train`: model and optimizer to the device.

        This transition and the others return the bytes that they moved of the `model` and of the `optimizer`. They
        change no number, in whatever order they are called; a call that needs what is away brings it back.
        """

    @abstractmethod
    def prepare_for_lp_inference(self) -> dict[str, int]:
        """Called before scoring: model to the device, and with `policy.offload.optimizer` the optimizer to the CPU."""

    @abstractmethod
    def is_alive(self) -> bool:
        """True."""

    @abstractmethod
    def get_info(self) -> dict[str, Any]:
        """`rank`, `pid`, `device`, `memory_bytes`, `threads`, and `versions` of the engine's packages.

        Where the worker can tell: `peak_memory_bytes`, the most since it was built or `reset_peak_memory_stats`.

        The driver reads how this worker makes microbatches, to plan them for all ranks at once: `batching` (padded,
        dynamic or packed; padded where it is not told), `preferred_tokens` of one, where the configuration does not
        say, and `pad_multiple` that lengths are padded to.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the process group; free the model."""

    # What it tells for people to look at: a backend may go without.

    def get_gpu_info(self) -> dict[str, Any]:
        """What this worker runs on, for a person to read.

        `rank`, `world_size`, `local_rank`, `local_device_id` (None on a CPU), `global_device_id` (`report_device_id`),
        `device_count`, `device_name`; in MiB `memory_allocated_mb`, `memory_reserved_mb`, `peak_memory_allocated_mb`,
        `peak_memory_reserved_mb` (on a CPU the process's resident memory, for both); `parameter_sample`: name, device,
        shape and dtype of one weight; `env_vars`: CUDA*, LOCAL_RANK, RANK and WORLD_SIZE as they are set.
        """
        raise NotSupported(f"{type(self).__name__} tells nothing of its device")

    def report_device_id(self) -> str:
        """`GPU-` and the UUID that NVML has for the GPU; of a CPU worker a name that no other process has."""
        raise NotSupported(f"{type(self).__name__} does not name its device")

    def reset_peak_memory_stats(self) -> None:
        """Count the peak memory from now on. What keeps no peak has nothing to do; not every system lets a process."""

    def start_profiling(
        self,
        ranks: tuple[int, ...] | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
        memory: bool = False,
    ) -> None:
        """Note each operation of these `ranks` (None: all) from now on, with the torch profiler.

        `with_stack`: and the source line that it came from; `record_shapes`: of its arguments; `memory`: what it took
        and freed.
        """
        raise NotSupported(f"{type(self).__name__} has no profiler")

    def stop_profiling(self, folder: str | None) -> str | None:
        """Note no more; write the trace to `folder`/rank-N.json.gz and return that path.

        None where this rank was not profiled, and where `folder` is None: the trace is then thrown away.
        """
        raise NotSupported(f"{type(self).__name__} has no profiler")

    def start_gpu_profiling(self) -> None:
        """Begin a range of the CUDA profiler (`nsys --capture-range=cudaProfilerApi`); a GPU is needed."""
        raise NotSupported(f"{type(self).__name__} has no profiler")

    def stop_gpu_profiling(self) -> None:
        """End the range."""
        raise NotSupported(f"{type(self).__name__} has no profiler")

    # What a backend may do besides: each raises `NotSupported` unless it declares the capability.

    def score(self, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> BatchedDataDict[Any]:
        """`scores [B]` fp32: what the head of a reward model (`policy.head=score`) says at each row's last token.

        The last token is told by `input_lengths`; 0 for a row without one. Capability `scoring`. A model that was
        loaded for its scores has no log-probabilities and is not trained (`NotSupported`), and the other way round.
        """
        raise NotSupported(_undeclared(self, "give scores", "scoring"))

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        *,
        form: str = "portable",
        asynchronous: bool = False,
    ) -> None:
        """Write what training goes on from, each directory whole or not. Capability `portable_optimizer_state`.

        `form="sharded"`: each worker writes its own pieces, with capability `sharded_checkpoints`; `asynchronous` then
        returns when they are copied, and `finish_checkpoint` must follow. `form="native"`: in the engine's own format,
        with capability `native_checkpoints`. Weights alone without `optimizer_path`.
        """
        raise NotSupported(_undeclared(self, "save its optimizer", "portable_optimizer_state"))

    def checkpoint_written(self) -> bool:
        """Whether this worker has written its part of the last save, so that `finish_checkpoint` does not wait."""
        return True

    def finish_checkpoint(self) -> None:
        """Wait for the last save and put it where it belongs; raises, on every worker, what failed on one.

        The next `save_checkpoint` and `load_checkpoint` do so too. Nothing where no save is under way.
        """

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Go on from what `save_checkpoint` wrote, in whichever form. Capability `portable_optimizer_state`.

        Files that are missing, truncated or damaged: a `DataError` that names the file, and nothing has changed. One
        too for the native form of another backend.
        """
        raise NotSupported(_undeclared(self, "load an optimizer", "portable_optimizer_state"))

    def save_adapter(self, path: str) -> None:
        """Write the LoRA adapters, fp32, as a directory that peft reads, whole or not. Capability `lora`."""
        raise NotSupported(_undeclared(self, "save adapters", "lora"))

    def load_adapter(self, path: str) -> None:
        """Take adapters that `save_adapter`, or peft, wrote of this base, rank and alpha. Capability `lora`.

        What does not fit is a `DataError`, and nothing has changed. The optimizer goes on with its moments.
        """
        raise NotSupported(_undeclared(self, "load adapters", "lora"))

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Form the process group of a refit with engines in other processes. Capability `collective_refit`.

        Rank 0 alone joins, as rank 0 of `world_size`, which is 1 and the number of engines; it listens at `ip` and
        `port`. A `RefitError` where the engines do not come within `generation.refit.deadline` seconds.
        """
        raise NotSupported(_undeclared(self, "send weights over a process group", "collective_refit"))

    def prepare_info_for_collective(self) -> dict[str, Any]:
        """Name to (shape, dtype) of what is sent, by either transport, in order. Capability `collective_refit`.

        Names and whole shapes are those of `save_pretrained`; floating-point weights go in `generation.refit.dtype`,
        others as they are.
        """
        raise NotSupported(_undeclared(self, "send weights over a process group", "collective_refit"))

    def broadcast_weights_for_collective(self) -> None:
        """Send all weights to the engines in the group, while they receive. Capability `collective_refit`.

        An engine that is gone, that takes longer than `generation.refit.deadline` seconds for a group of weights, or
        that finds something wrong is a `RefitError` of rank 0. The other ranks leave the call as ever, and all of them
        go on; after the first two cases `init_collective` is needed again.
        """
        raise NotSupported(_undeclared(self, "send weights over a process group", "collective_refit"))

    def prepare_weights_for_ipc(self, rooms: Mapping[str, Any] | None = None) -> tuple[list[tuple[str, int]], float]:
        """Begin a refit: names and bytes of the weights as they are sent, and the bytes that are free for a group.

        `rooms`: device id to what an engine there answered to `offer_refit_memory`; weights are written there then.
        Capability `ipc_refit`.
        """
        raise NotSupported(_undeclared(self, "share weights with another process", "ipc_refit"))

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, Any]:
        """Device id to the handles of the named weights for processes on that device. Capability `ipc_refit`.

        All ranks gather; on CPUs the first rank of each machine answers for it, the others with nothing. Where no
        engine offered memory, the third group before it is written over, so that must have been read by then. Without
        `prepare_weights_for_ipc` before it, once a refit, a `RefitNotPrepared`.
        """
        raise NotSupported(_undeclared(self, "share weights with another process", "ipc_refit"))


def _undeclared(worker: PolicyWorker, what: str, capability: str) -> str:
    return (
        f"{type(worker).__name__} does not {what}: its backend does not declare {capability}; choose a policy.backend "
        "that does: see `rlframework plugins`"
    )
