"""The primitives that a training engine supplies to `PolicyWorkerBase`: exactly what differs between engines.

Each primitive is called on all ranks of the worker group at the same time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlframework.errors import NotSupported
from rlframework.interfaces.data_processor import MicrobatchRule

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from rlframework.interfaces.data_processor import Microbatch
    from rlframework.policy.head.request import HeadOutput, HeadRequest
    from rlframework.policy.model_state import Moments, ShardedState, WeightSpec


@dataclass
class StepResult:
    """The result of `step` for one microbatch: a scalar loss with gradient, and values without gradient."""

    loss: Tensor | None = None
    outputs: dict[str, Any] = field(default_factory=dict)


Step = Callable[["HeadOutput", "Microbatch"], StepResult]


def _not_implemented(engine: Engine, does: str, capability: str, method: str) -> NotSupported:
    return NotSupported(
        f"{type(engine).__name__} {does}: its backend does not declare {capability}, or declares it without "
        f"implementing `{method}`"
    )


class Engine(ABC):
    """The primitives of a training engine. Backends subclass `PolicyWorkerBase`, which derives from this class."""

    @abstractmethod
    def build(self, *, init_optimizer: bool) -> None:
        """Load `self.config.model_name`, shard it over the workers, and create the optimizer.

        The optimizer's parameter groups come from `rlframework.policy.optimization.parameter_groups`.
        """

    @abstractmethod
    def forward_backward(
        self, microbatches: Sequence[Microbatch], head: HeadRequest, step: Step, *, forward_only: bool
    ) -> list[StepResult]:
        """Run each microbatch through the model, the head inside its forward, and `step` on the head's output.

        All ranks get the same number of microbatches, at least one. Unless `forward_only`, the gradients afterwards are
        the SUM of d(loss) over microbatches and data-parallel ranks, replacing any earlier gradients; an engine that
        averages must undo it. With `forward_only` no gradients are computed and the model is in evaluation mode.

        Returns the results in order, on every rank. A microbatch may have no head positions: the head then runs on no
        rows, and the loss must still depend on its output, so that every backward reaches every weight.
        """

    @abstractmethod
    def clip_and_step(self, max_grad_norm: float | None, lr: float) -> tuple[float, bool]:
        """Clip the gradient to `max_grad_norm` (None: no clipping) and take one optimizer step at `lr`.

        Returns the L2 norm of the whole gradient before clipping, and whether the step was skipped. If the norm is not
        finite, the step is skipped and nothing changes.
        """

    @abstractmethod
    def weight_specs(self) -> dict[str, WeightSpec]:
        """Return shapes and dtypes of all weights, without a collective.

        Names are those that `save_pretrained` writes; tied weights appear once.
        """

    @abstractmethod
    def gather_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights, one at a time, on every rank.

        Collective: all ranks must request the same names and exhaust the iterator.
        """

    @abstractmethod
    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of this rank's shards of the weights, in CPU memory."""

    @abstractmethod
    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Write a snapshot back in place, bit for bit."""

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load whole weights, for all names in `weight_specs`: each rank copies its shards in place. No collective."""
        raise _not_implemented(self, "does not load weights", "portable_optimizer_state", "load_weights")

    def gather_moments(self) -> Iterator[tuple[str, Moments]]:
        """Yield the optimizer state of each trainable weight, whole, one at a time, on every rank.

        Collective; the iterator must be exhausted. A weight that no step has updated has 0 steps and zero moments.
        """
        raise _not_implemented(self, "does not gather moments", "portable_optimizer_state", "gather_moments")

    def load_moments(self, moments: Mapping[str, Moments]) -> None:
        """Load the output of `gather_moments`, possibly of another backend or layout: each rank copies its shards."""
        raise _not_implemented(self, "does not load moments", "portable_optimizer_state", "load_moments")

    def sharded_state(self) -> ShardedState:
        """Return this rank's shards of weights and moments, sharing the memory that is trained. No collective.

        Every element of each weight in `weight_specs`, and of the moments of trainable weights, must be in the shard of
        some rank; ranks that hold the same shard all return it. A weight that no step has updated has 0 steps and zero
        moments.
        """
        raise _not_implemented(self, "does not expose its shards", "sharded_checkpoints", "sharded_state")

    def save_native(self, folder: Path, *, optimizer: bool) -> None:
        """Write the model and, if `optimizer`, the optimizer state in the engine's own format. Collective.

        `folder` is empty, and the same on all ranks, which share its file system. Core writes random states, call
        counters, the model's configuration and checksums next to it.
        """
        raise _not_implemented(self, "has no native checkpoint format", "native_checkpoints", "save_native")

    def load_native(self, folder: Path, *, optimizer: bool) -> None:
        """Load the output of `save_native`, bit for bit under the same layout. Collective.

        Raises a `DataError` if the engine cannot resume from it under the current layout.
        """
        raise _not_implemented(self, "has no native checkpoint format", "native_checkpoints", "load_native")

    def microbatch_rule(self) -> MicrobatchRule:
        """Return the engine's constraints on microbatches."""
        return MicrobatchRule()

    def preferred_batching(self) -> str:
        """Return the mode that `batching.mode=auto` selects on this device: "padded", "dynamic" or "packed"."""
        return "padded"

    def preferred_tokens(self) -> int:
        """Return the default tokens per dynamic or packed microbatch on this device."""
        return 8192

    def move(self, device: torch.device, *, model: bool = False, optimizer: bool = False) -> int:
        """Move this rank's weights and buffers, or its optimizer state, to `device`.

        Returns the number of bytes moved. Between calls the optimizer state is on the weights' device or in CPU memory.
        """
        raise _not_implemented(self, "does not move its model or optimizer", "cpu_offload", "move")

    def whole_model(self) -> torch.nn.Module | None:
        """Return the live module if a single rank can call it with whole parameters; otherwise None."""
        return None

    def generating(self) -> AbstractContextManager[None]:
        """Return the context in which `whole_model` is used for generation."""
        return nullcontext()

    def data_parallel_group(self) -> Any:
        """Return the process group that batches are sharded over; None for a single rank."""
        return None

    def data_parallel_size(self) -> int:
        """Return the number of ranks that batches are sharded over."""
        return 1

    def close(self) -> None:
        """Free the model and leave the process groups that the engine created."""
