"""Parallel styles that `torch.distributed.tensor.parallel` lacks; custom plans may use them too.

`Hidden` and `Output` redistribute activations between replicated and sequence-sharded; `ConvColumns` and `ConvRows`
shard GPT-2's `Conv1D`; `Norm` and `HeadNorm` are for norms over a rank's tokens or heads; `Replicated` is for weights
that are replicated next to a sharded layer; `Embedding` shards an embedding over the vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.placement_types import Placement

from rlframework.base.errors import NotSupported

REPLICATED, SEQUENCE = Replicate(), Shard(1)
"""Layouts of hidden states `[B, S, H]`: whole on each rank, or sharded along the sequence."""


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace the parameter `name` of `module`, the same on every rank or on meta, by this rank's shard."""
    parameter = getattr(module, name)
    part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


class Hidden(ParallelStyle):
    """Redistribute a module's hidden states, its first argument or `hidden_states`, from `source` to `target`.

    `local`: pass a plain tensor, whose gradient is the same on every rank; otherwise a `DTensor`, for a module whose
    submodules take `DTensor`s and each contribute a share of the gradient.
    """

    def __init__(self, source: Placement, target: Placement, *, local: bool = False) -> None:
        self.source, self.target, self.local = source, target, local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if args:
                return (self.moved(args[0], device_mesh), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": self.moved(kwargs["hidden_states"], device_mesh)}

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module

    def moved(self, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return `tensor` in the target layout."""
        sharded = tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [self.source])
        sharded = sharded.redistribute(placements=[self.target])
        return sharded.to_local() if self.local else sharded


class Output(Hidden):
    """Redistribute a module's output, or the first of its outputs, from `source` to `target`, as a plain tensor."""

    def __init__(self, source: Placement, target: Placement) -> None:
        super().__init__(source, target, local=True)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def after(_: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (self.moved(output[0], device_mesh), *output[1:])
            return self.moved(output, device_mesh)

        module.register_forward_hook(after)
        return module


class Norm(SequenceParallel):
    """A norm over a shard of the sequence; its weight's gradient is summed over the ranks."""

    def __init__(self) -> None:
        super().__init__(sequence_dim=1, use_local_output=True)


class HeadNorm(SequenceParallel):
    """A norm per head, over the heads of this rank; its weight's gradient is summed over the ranks."""

    def __init__(self) -> None:
        super().__init__(sequence_dim=2, use_local_output=True)


class Replicated(ParallelStyle):
    """A module with replicated weights, whose input and output have the layout `layout`.

    If each rank has a share of the weights' gradient, it is summed over the ranks. `local`: return plain tensors, whose
    gradients have the layout too; otherwise a `DTensor`.
    """

    def __init__(self, layout: Placement, *, local: bool) -> None:
        self.layout, self.local = layout, local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def before(_: nn.Module, args: tuple[Any, ...]) -> Any:
            given = args[0]
            return given if isinstance(given, DTensor) else DTensor.from_local(given, device_mesh, [self.layout])

        for name, _ in list(module.named_parameters(recurse=False)):
            shard_parameter(module, name, device_mesh, REPLICATED)
        module.register_forward_pre_hook(before)
        if self.local:
            module.register_forward_hook(lambda _, args, output: output.to_local())
        return module


class Chained(ParallelStyle):
    """Several styles on one module, applied in order."""

    def __init__(self, *styles: ParallelStyle) -> None:
        self.styles = styles

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in self.styles:
            style.src_data_rank = None
            module = style._apply(module, device_mesh)
        return module


class _Conv(ParallelStyle):
    """transformers' `Conv1D`, with weight `[in, out]`: uses the hooks of the corresponding style for linear layers."""

    placements: ClassVar[dict[str, Placement]]

    def __init__(self, linear: ColwiseParallel | RowwiseParallel) -> None:
        self.linear = linear

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self.placements.items():
            shard_parameter(module, name, device_mesh, placement)
        linear = self.linear
        wanted = (Shard(-1),) if isinstance(linear, RowwiseParallel) else (Replicate(),)
        prepare: Any = linear._prepare_input_fn
        finish: Any = linear._prepare_output_fn
        module.register_forward_pre_hook(
            lambda mod, args: prepare(linear.input_layouts, wanted, mod, args, device_mesh)
        )
        module.register_forward_hook(
            lambda mod, args, output: finish(linear.output_layouts, linear.use_local_output, mod, output, device_mesh)
        )
        return module


class ConvColumns(_Conv):
    """`ColwiseParallel` for `Conv1D`."""

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(1), "bias": Shard(0)}

    def __init__(self) -> None:
        super().__init__(ColwiseParallel())


class ConvRows(_Conv):
    """`RowwiseParallel` for `Conv1D`."""

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(0), "bias": Replicate()}

    def __init__(self, *, output_layouts: Placement | None = None) -> None:
        super().__init__(RowwiseParallel(output_layouts=output_layouts))


def vocabulary_rows(vocabulary: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return this rank's (first id, number of ids), as torch shards `vocabulary` rows along `mesh`."""
    size = -(-vocabulary // mesh.size())
    start = min(size * mesh.get_local_rank(), vocabulary)
    return start, min(size, vocabulary - start)


class Embedding(ParallelStyle):
    """An embedding sharded over the vocabulary; the sum over the ranks is the whole embedding, on each of them.

    Works on plain tensors, so that scaled embeddings (Gemma's) are supported too. `padding_idx` gets no gradient.
    """

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        if not _plain(module):
            raise NotSupported(
                f"the embedding {type(module).__name__} cannot be sharded over the vocabulary; "
                "set policy.parallelism.tensor to 1"
            )
        start, rows = vocabulary_rows(module.num_embeddings, device_mesh)
        if not rows:
            raise NotSupported(
                f"a vocabulary of {module.num_embeddings} cannot be sharded over {device_mesh.size()} workers; "
                "lower policy.parallelism.tensor"
            )
        shard_parameter(module, "weight", device_mesh, Shard(0))
        group = device_mesh.get_group()

        def forward(ids: Tensor) -> Tensor:
            inside = (ids >= start) & (ids < start + rows)
            embedded = nn.functional.embedding((ids - start).where(inside, 0), module.weight.to_local())
            if module.padding_idx is not None:
                has_gradient = inside & (ids != module.padding_idx)
                embedded = torch.where(has_gradient[..., None], embedded, embedded.detach())
            embedded = embedded.where(inside[..., None], 0.0)
            whole: Tensor = _Sum.apply(embedded, group)  # type: ignore[no-untyped-call]
            scale = getattr(module, "embed_scale", None)
            return whole if scale is None else whole * scale.to(whole.dtype)

        module.forward = forward
        embedding: nn.Module = module
        return embedding


def _plain(module: nn.Module) -> bool:
    """Return True if the forward is that of `nn.Embedding`, possibly times `embed_scale` as in Gemma."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    return type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")


class _Sum(torch.autograd.Function):
    """Sum over a group. The gradient of the sum, the same on every rank, is that of each summand."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


Plan = dict[str, ParallelStyle]
"""Styles by module path relative to the model; `*` matches one path component."""
