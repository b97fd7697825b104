"""The primitives of a training engine: exactly what differs between engines.

A policy worker has an engine, and calls each primitive on all ranks of the worker group at the same time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rlframework.base.errors import NotSupported
from rlframework.config.base import Section
from rlframework.interfaces.data_processor import MicrobatchRule
from rlframework.interfaces.loss import head_of
from rlframework.policy.profiling import DeviceWait

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.policy import PolicyConfig
    from rlframework.interfaces.data_processor import Microbatch
    from rlframework.interfaces.loss import LossFunction
    from rlframework.interfaces.worker_group import WorkerContext
    from rlframework.policy.head.patch import HeadOutput, HeadRequest
    from rlframework.policy.host_buffers import HostBuffers


@dataclass(frozen=True)
class WeightSpec:
    """Shape and dtype of a whole weight, known without gathering it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Moments:
    """The optimizer's state of one whole weight: its number of steps, and AdamW's moments in fp32.

    Of a weight that Muon updates, `exp_avg` is the average of gradients and `exp_avg_sq` has no elements.
    """

    steps: int
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True)
class TensorShard:
    """This rank's shard of the tensor `name` of shape `shape`: `local`, at `offset` in the whole tensor."""

    name: str
    local: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def where(self) -> tuple[slice, ...]:
        """The slices of the whole tensor that `local` has."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.local.shape, strict=True))

    def value(self) -> Tensor:
        """Return the data to write. A shard not in memory yet overrides this; its `local` is on the meta device."""
        return self.local


@dataclass(frozen=True)
class ShardedState:
    """An engine's state on this rank: shards of the weights, and of the moments, named as in the portable form.

    The shards share the memory that is trained. `steps`: optimizer steps by name, of the weights that this rank has
    shards of. `moments` and `steps` are empty without an optimizer.
    """

    weights: Sequence[TensorShard]
    moments: Sequence[TensorShard] = ()
    steps: Mapping[str, int] = field(default_factory=dict)


@dataclass
class StepResult:
    """The result of `step` for one microbatch: a scalar loss with gradient, and values without gradient."""

    loss: Tensor | None = None
    outputs: dict[str, Any] = field(default_factory=dict)


Step = Callable[["HeadOutput", "Microbatch"], StepResult]
"""`step(output, microbatch)` computes the loss and the results of a microbatch from the head's output."""


def _not_implemented(engine: Engine, does: str, capability: str, method: str) -> NotSupported:
    return NotSupported(
        f"{type(engine).__name__} {does}: its backend does not declare {capability}, or declares it without "
        f"implementing `{method}`"
    )


def no_adapters(engine: Engine) -> NotSupported:
    """Return the error of an engine without adapters."""
    return NotSupported(f"{type(engine).__name__} has no adapters: policy.lora is not set, or its backend has no LoRA")


def require_head(config: PolicyConfig, head: str, method: str) -> None:
    """Raise `NotSupported` if the model is loaded with another head than `method` needs."""
    if config.head != head:
        raise NotSupported(
            f"{method} needs policy.head={head}, but policy.model_name={config.model_name!r} is loaded "
            f"with policy.head={config.head}"
        )


def require_head_of(config: PolicyConfig, loss_fn: LossFunction) -> None:
    """Raise `NotSupported` if the model is loaded with another head than `loss_fn` reads."""
    head = head_of(loss_fn)
    require_head(config, head, f"train with {type(loss_fn).__name__}")
    if loss_fn.wants_entropy and head != "language":
        raise NotSupported(
            f"{type(loss_fn).__name__} wants the entropy of tokens, which the head {head} does not have; set its "
            "wants_entropy to False"
        )


@dataclass(eq=False, repr=False)
class Engine(ABC):
    """One rank of a model in training. A backend subclasses it and names it in its `PolicyWorkerBase.engine_class`.

    `config` are the backend-neutral keys of `policy`, `backend_config` is the backend's own section. The constructor
    keeps its arguments; `build` builds the model on `device`.
    """

    backend_config_model: ClassVar[type[Section]] = Section
    """Model of the backend's own configuration section, `policy.<backend>`."""

    transports: ClassVar[frozenset[str]] = frozenset({"ipc", "collective"})
    """Transports of weight sync. One that a backend removes must not be declared on its record."""

    config: PolicyConfig
    backend_config: Section
    tokenizer: PreTrainedTokenizerBase
    context: WorkerContext
    device: torch.device
    adapters_disabled: bool = field(default=False, init=False)
    """Whether `without_adapters` is active."""
    waits: DeviceWait = field(default_factory=DeviceWait, init=False)
    """An engine that reads the gradient norm within `waits.measured()` has the metric `time/device/wait`."""

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
        finite, the step is skipped and nothing changes. A gradient of exactly 0 is an ordinary step with the norm 0.
        """

    @abstractmethod
    def weight_specs(self) -> dict[str, WeightSpec]:
        """Return the specs of all weights by the names `save_pretrained` writes; tied weights once. No collective."""

    @abstractmethod
    def gather_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights, one at a time. Collective: all ranks request the same names and exhaust the iterator."""

    @abstractmethod
    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of this rank's shards of the weights, in CPU memory."""

    @abstractmethod
    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Write a snapshot back in place, bit for bit."""

    def swap(self, snapshot: dict[str, Tensor], host: HostBuffers) -> dict[str, Tensor]:
        """Write a snapshot and return one of the weights that it replaces, which is valid until the next swap.

        Same as `snapshot` and then `restore`. An engine that copies through `host` does not wait for a GPU.
        """
        current = self.snapshot()
        self.restore(snapshot)
        return current

    def mix(self, snapshot: dict[str, Tensor], other: Mapping[str, Tensor], alpha: float) -> None:
        """Change `snapshot` to `alpha` times `other` plus `1 - alpha` times itself; both are snapshots of this rank.

        Computed in fp32. An engine whose snapshots hold a weight twice, in two precisions, must keep these consistent.
        Collective.
        """
        import torch

        for name, tensor in snapshot.items():
            if not tensor.is_floating_point():
                tensor.copy_(other[name])
                continue
            exact = tensor.to(torch.promote_types(tensor.dtype, torch.float32))  # the tensor itself if it is fp32
            tensor.copy_(exact.lerp_(other[name].to(exact.dtype), alpha))

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

    # LoRA. From outside, the model is the merged one under the base's names.

    def adapter_specs(self) -> dict[str, WeightSpec]:
        """Return the specs of the adapters' matrices, two per layer, by layer path plus `A` or `B`. No collective."""
        raise no_adapters(self)

    def gather_adapters(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole matrices in fp32, one at a time; see `gather_weights`. Collective."""
        raise no_adapters(self)

    def take_adapters(self, adapters: Mapping[str, Tensor]) -> None:
        """Load whole matrices, for all names in `adapter_specs`: each rank copies its shards. No collective."""
        raise no_adapters(self)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Context manager: disable the adapters until its exit, so that the model equals its base bit for bit."""
        if self.adapters_disabled:
            yield
            return
        try:
            self.enable_adapters(False)
            self.adapters_disabled = True
            yield
        finally:
            self.enable_adapters(True)
            self.adapters_disabled = False

    def enable_adapters(self, enabled: bool) -> None:
        """Switch the adapters on or off, for `without_adapters`."""
        raise no_adapters(self)

    # Microbatches, placement, generation, process groups.

    def microbatch_rule(self) -> MicrobatchRule:
        """Return the engine's constraints on microbatches."""
        return MicrobatchRule()

    def preferred_batching(self) -> str:
        """Return the mode that `batching.mode=auto` selects on this device: "padded", "dynamic" or "packed"."""
        return "padded"

    def preferred_tokens(self) -> int:
        """Return the default tokens per dynamic or packed microbatch: on a CPU few, which fit its caches."""
        return 1024 if self.device.type == "cpu" else 8192

    def move(self, device: torch.device, *, model: bool = False, optimizer: bool = False) -> int:
        """Move this rank's weights and buffers, or its optimizer state, to `device`.

        Returns the number of bytes moved. Between calls the optimizer state is on the weights' device or in CPU memory.
        """
        raise _not_implemented(self, "does not move its model or optimizer", "cpu_offload", "move")

    def whole_model(self) -> torch.nn.Module | None:
        """Return the live module if a single rank can call it with whole parameters; otherwise None."""
        return None

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Context in which `whole_model` generates: in evaluation mode, which keeps the key-value cache enabled."""
        if (model := self.whole_model()) is not None:
            model.eval()
        yield

    def data_parallel_group(self) -> ProcessGroup | None:
        """Return the process group that batches are sharded over: by default all ranks, None for a single one."""
        import torch

        return torch.distributed.group.WORLD if self.context.world_size > 1 else None

    def data_parallel_size(self) -> int:
        """Return the number of ranks that batches are sharded over."""
        return self.context.world_size

    def close(self) -> None:
        """Free the model and leave the process groups that the engine created."""
