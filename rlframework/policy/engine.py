"""The primitives that a training engine supplies to `PolicyWorkerBase`: what differs between engines, and nothing else.

Everything is called on all ranks of the group at the same time.
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
    """What `step` made of one microbatch: the scalar loss with gradient, and values for the base without."""

    loss: Tensor | None = None
    outputs: dict[str, Any] = field(default_factory=dict)


Step = Callable[["HeadOutput", "Microbatch"], StepResult]


def _not_written(engine: Engine, does: str, capability: str, method: str) -> NotSupported:
    return NotSupported(
        f"{type(engine).__name__} {does}: its backend does not declare {capability}, or declares it without writing "
        f"`{method}`"
    )


class Engine(ABC):
    """The primitives. A backend's worker derives from `PolicyWorkerBase`, which derives from this."""

    @abstractmethod
    def build(self, *, init_optimizer: bool) -> None:
        """Load `self.config.model_name`, split it over the workers, make the optimizer from core's parameter groups."""

    @abstractmethod
    def forward_backward(
        self, microbatches: Sequence[Microbatch], head: HeadRequest, step: Step, *, forward_only: bool
    ) -> list[StepResult]:
        """Run each microbatch through the model, the head inside its forward, and `step` on what the head gives.

        All ranks get equally many microbatches, one at least. Unless `forward_only`, gradients afterwards are the SUM
        over microbatches and data-parallel ranks of d(loss), whatever was there before; the engine undoes its own
        averaging. With `forward_only` there is no gradient and the model is in evaluation mode. Results in order, on
        every rank. A microbatch may have no head position: the head runs on no rows then, and the loss must hang on
        what it gives, so that every backward reaches every weight.
        """

    @abstractmethod
    def clip_and_step(self, max_grad_norm: float | None, lr: float) -> tuple[float, bool]:
        """L2 norm of the whole gradient before clipping; clip to `max_grad_norm`, one optimizer step at `lr`.

        A norm that is not finite: no step, nothing changed; the second value is True.
        """

    @abstractmethod
    def weight_specs(self) -> dict[str, WeightSpec]:
        """All weights under the names that `save_pretrained` writes, tied ones once. Local knowledge, no collective."""

    @abstractmethod
    def gather_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole weights, one at a time, on every rank. Collective: all ask for the same names and drain it."""

    @abstractmethod
    def snapshot(self) -> dict[str, Tensor]:
        """Copies of this rank's shards of the weights, on the CPU."""

    @abstractmethod
    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Put a snapshot back, in place, bit for bit."""

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take whole weights, of all names of `weight_specs`: each rank its shards, in place. No collective."""
        raise _not_written(self, "does not load weights", "portable_optimizer_state", "load_weights")

    def gather_moments(self) -> Iterator[tuple[str, Moments]]:
        """The optimizer's state of each trainable weight, whole, one at a time, on every rank. Collective, drained.

        A weight that no step has touched has 0 steps and zeros.
        """
        raise _not_written(self, "does not gather moments", "portable_optimizer_state", "gather_moments")

    def load_moments(self, moments: Mapping[str, Moments]) -> None:
        """Take what `gather_moments` gave, here or on another backend or layout: each rank its shards."""
        raise _not_written(self, "does not load moments", "portable_optimizer_state", "load_moments")

    def sharded_state(self) -> ShardedState:
        """This rank's pieces of weights and moments, which share the memory of what is trained. No collective.

        Every element of a weight of `weight_specs`, and of the moments of those that are trained, is in a piece of some
        rank; ranks that hold the same piece both tell it. A weight that no step has touched has 0 steps and zeros.
        """
        raise _not_written(self, "does not tell its pieces", "sharded_checkpoints", "sharded_state")

    def save_native(self, folder: Path, *, optimizer: bool) -> None:
        """Write the model, and the `optimizer`'s state if asked, in the engine's own format. Collective.

        `folder` is empty and the same for all ranks, which share its file system. Not here: random states, counts of
        calls, the model's configuration and checksums, which core writes beside it.
        """
        raise _not_written(self, "has no format of its own", "native_checkpoints", "save_native")

    def load_native(self, folder: Path, *, optimizer: bool) -> None:
        """Take up what `save_native` wrote, to the bit under the same layout. Collective.

        A `DataError` where the engine cannot go on from it under the layout at hand.
        """
        raise _not_written(self, "has no format of its own", "native_checkpoints", "load_native")

    def microbatch_rule(self) -> MicrobatchRule:
        """What the engine asks of microbatches."""
        return MicrobatchRule()

    def preferred_batching(self) -> str:
        """What `batching.mode=auto` means on this device: padded, dynamic or packed."""
        return "padded"

    def preferred_tokens(self) -> int:
        """Tokens of a dynamic or packed microbatch on this device, where the configuration does not say."""
        return 8192

    def move(self, device: torch.device, *, model: bool = False, optimizer: bool = False) -> int:
        """Move this rank's weights and buffers, or its optimizer's state, to `device`; the bytes that were not there.

        Between calls the optimizer lies where the weights do, or on the CPU.
        """
        raise _not_written(self, "does not move what it holds", "cpu_offload", "move")

    def whole_model(self) -> torch.nn.Module | None:
        """The live module if its parameters are whole and it can be called by one rank alone; else None."""
        return None

    def generating(self) -> AbstractContextManager[None]:
        """Around the use of `whole_model` for generation."""
        return nullcontext()

    def data_parallel_group(self) -> Any:
        """Process group over which batches are sharded; None when this rank is alone."""
        return None

    def data_parallel_size(self) -> int:
        """Ranks in it."""
        return 1

    def close(self) -> None:
        """Free the model and leave process groups that the engine made."""
