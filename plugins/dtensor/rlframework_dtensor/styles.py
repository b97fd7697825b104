"""Parallel styles that `torch.distributed.tensor.parallel` lacks: for a custom plan too.

`Hidden` and `Output` move activations between whole and split along the sequence; `ConvColumns` and `ConvRows` split
GPT-2's `Conv1D`; `Norm` and `HeadNorm` are for norms over the tokens or heads that a rank has; `Copied` is for what
every rank has whole beside something split; `Embedding` splits an embedding over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.placement_types import Placement

from rlframework.errors import NotSupported

WHOLE, SEQUENCE = Replicate(), Shard(1)
"""Layouts of hidden states `[B, S, H]`: each rank has all, or its part of the sequence."""


def cut(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace the parameter `name` of `module` by this rank's part of it; every rank has the same value, or none."""
    parameter = getattr(module, name)
    part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


class Hidden(ParallelStyle):
    """The module gets its hidden states, first argument or `hidden_states`, as `target`; they come as `source`.

    `local`: as a plain tensor, whose gradient is the same on every rank; else as a `DTensor`, for a module whose parts
    take such ones and give each a share of the gradient.
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
        """`tensor` in its new layout."""
        found = tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [self.source])
        found = found.redistribute(placements=[self.target])
        return found.to_local() if self.local else found


class Output(Hidden):
    """What the module returns, or the first of what it returns, goes on as `target`; it comes as `source`."""

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
    """A norm over a part of the sequence: its weight's gradient is summed over the ranks."""

    def __init__(self) -> None:
        super().__init__(sequence_dim=1, use_local_output=True)


class HeadNorm(SequenceParallel):
    """A norm of each head, over the heads that a rank has: its weight's gradient is summed over the ranks."""

    def __init__(self) -> None:
        super().__init__(sequence_dim=2, use_local_output=True)


class Copied(ParallelStyle):
    """A module whose weights every rank has whole; what it takes lies as `layout`, and so does what it gives.

    The gradient of its weights is summed over the ranks where each has a share of it. `local`: it gives plain tensors,
    whose gradients come as `layout` too; else a `DTensor`.
    """

    def __init__(self, layout: Placement, *, local: bool) -> None:
        self.layout, self.local = layout, local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def before(_: nn.Module, args: tuple[Any, ...]) -> Any:
            given = args[0]
            return given if isinstance(given, DTensor) else DTensor.from_local(given, device_mesh, [self.layout])

        for name, _ in list(module.named_parameters(recurse=False)):
            cut(module, name, device_mesh, WHOLE)
        module.register_forward_pre_hook(before)
        if self.local:
            module.register_forward_hook(lambda _, args, output: output.to_local())
        return module


class Joined(ParallelStyle):
    """Several styles on one module, in this order."""

    def __init__(self, *styles: ParallelStyle) -> None:
        self.styles = styles

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in self.styles:
            style.src_data_rank = None
            module = style._apply(module, device_mesh)
        return module


class _Conv(ParallelStyle):
    """`Conv1D` of transformers, whose weight is `[in, out]`: hooks as those of the linear style that it is made of."""

    placements: ClassVar[dict[str, Placement]]

    def __init__(self, linear: ColwiseParallel | RowwiseParallel) -> None:
        self.linear = linear

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self.placements.items():
            cut(module, name, device_mesh, placement)
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
    """As `ColwiseParallel`."""

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(1), "bias": Shard(0)}

    def __init__(self) -> None:
        super().__init__(ColwiseParallel())


class ConvRows(_Conv):
    """As `RowwiseParallel`."""

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(0), "bias": Replicate()}

    def __init__(self, *, output_layouts: Placement | None = None) -> None:
        super().__init__(RowwiseParallel(output_layouts=output_layouts))


def vocabulary_rows(vocabulary: int, mesh: DeviceMesh) -> tuple[int, int]:
    """(first id, number of ids) of this rank, as torch cuts `vocabulary` rows along `mesh`."""
    size = -(-vocabulary // mesh.size())
    start = min(size * mesh.get_local_rank(), vocabulary)
    return start, min(size, vocabulary - start)


class Embedding(ParallelStyle):
    """Each rank has the embeddings of some ids; the sum over the ranks is the whole embedding, on each of them.

    On plain tensors, so that one with a scale of its own (Gemma's) is split as well. `padding_idx` gets no gradient.
    """

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        if not _plain(module):
            raise NotSupported(
                f"the embedding {type(module).__name__} cannot be split over the vocabulary; "
                "set policy.parallelism.tensor to 1"
            )
        start, rows = vocabulary_rows(module.num_embeddings, device_mesh)
        if not rows:
            raise NotSupported(
                f"a vocabulary of {module.num_embeddings} cannot be split over {device_mesh.size()} workers; "
                "lower policy.parallelism.tensor"
            )
        cut(module, "weight", device_mesh, Shard(0))
        group = device_mesh.get_group()

        def forward(ids: Tensor) -> Tensor:
            inside = (ids >= start) & (ids < start + rows)
            found = nn.functional.embedding((ids - start).where(inside, 0), module.weight.to_local())
            if module.padding_idx is not None:
                inside_and_trained = inside & (ids != module.padding_idx)
                found = torch.where(inside_and_trained[..., None], found, found.detach())
            found = found.where(inside[..., None], 0.0)
            whole: Tensor = _Sum.apply(found, group)  # type: ignore[no-untyped-call]
            scale = getattr(module, "embed_scale", None)
            return whole if scale is None else whole * scale.to(whole.dtype)

        module.forward = forward
        embedding: nn.Module = module
        return embedding


def _plain(module: nn.Module) -> bool:
    """Whether its forward is that of `nn.Embedding`, or that times `embed_scale`, as Gemma's."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    return type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")


class _Sum(torch.autograd.Function):
    """The sum over a group; the gradient of the sum, the same on every rank, is that of each part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


Plan = dict[str, ParallelStyle]
"""Styles by the modules' paths from the model; `*` stands for any one name."""
PlanMaker = Callable[[], Plan]
