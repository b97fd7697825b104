"""The policy-worker interface: one process of the model that is trained.

Names follow NeMo-RL's workers. `rlframework.policy.worker_base.PolicyWorkerBase` implements all that does not depend on
the engine; a backend derives from it and supplies the primitives of `rlframework.policy.engine.Engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rlframework.errors import NotSupported

if TYPE_CHECKING:
    from rlframework.distributed.batched_data_dict import BatchedDataDict
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
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Called before `train`: model and optimizer to the device."""

    @abstractmethod
    def prepare_for_lp_inference(self) -> None:
        """Called before log-probabilities are asked for: model to the device, optimizer away where memory is short."""

    @abstractmethod
    def is_alive(self) -> bool:
        """True."""

    @abstractmethod
    def get_info(self) -> dict[str, Any]:
        """`rank`, `pid`, `device`, `memory_bytes`, `threads`, and `versions` of the engine's packages.

        The driver reads how this worker makes microbatches, to plan them for all ranks at once: `batching` (padded,
        dynamic or packed; padded where it is not told), `preferred_tokens` of one, where the configuration does not
        say, and `pad_multiple` that lengths are padded to.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the process group; free the model."""

    # What a backend may do besides: each raises `NotSupported` unless it declares the capability.

    def score(self, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> BatchedDataDict[Any]:
        """`scores [B]` fp32 of a reward model's head. Capability `scoring`."""
        raise NotSupported(_undeclared(self, "give scores", "scoring"))

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, tokenizer_path: str | None = None
    ) -> None:
        """Write what training goes on from, in the portable form. Capability `portable_optimizer_state`."""
        raise NotSupported(_undeclared(self, "save its optimizer", "portable_optimizer_state"))

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Go on from what `save_checkpoint` wrote. Capability `portable_optimizer_state`."""
        raise NotSupported(_undeclared(self, "load an optimizer", "portable_optimizer_state"))

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Join the process group of a refit with engines in other processes. Capability `collective_refit`."""
        raise NotSupported(_undeclared(self, "send weights over a process group", "collective_refit"))

    def prepare_info_for_collective(self) -> dict[str, Any]:
        """Name to shape and dtype of what `broadcast_weights_for_collective` sends. Capability `collective_refit`."""
        raise NotSupported(_undeclared(self, "send weights over a process group", "collective_refit"))

    def broadcast_weights_for_collective(self) -> None:
        """Send all weights to the engines in the group. Capability `collective_refit`."""
        raise NotSupported(_undeclared(self, "send weights over a process group", "collective_refit"))

    def prepare_weights_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        """Names and bytes of the weights, and the bytes that are free for a group of them. Capability `ipc_refit`."""
        raise NotSupported(_undeclared(self, "share weights with another process", "ipc_refit"))

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, Any]:
        """Handles of the named weights for a process on the same device. Capability `ipc_refit`."""
        raise NotSupported(_undeclared(self, "share weights with another process", "ipc_refit"))


def _undeclared(worker: PolicyWorker, what: str, capability: str) -> str:
    return (
        f"{type(worker).__name__} does not {what}: its backend does not declare {capability}; choose a policy.backend "
        "that does: see `rlframework plugins`"
    )
