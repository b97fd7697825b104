"""Adapters beside tensor parallelism: how the two matrices of a layer are split where the layer is."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from rlframework.errors import NotSupported
from rlframework.models.adapters import ADAPTER, layers_of
from rlframework_dtensor.styles import WHOLE, Copied, Plan


def with_adapters(model: nn.Module, plan: Plan) -> Plan:
    """`plan`, of the model without adapters, for the one with them.

    Of a layer that is split by columns B is split so too, by rows A: what each rank adds has the layout of what it is
    added to. The other matrix is whole on every rank, and the shares of its gradient are added up.
    """
    layers = layers_of(model)
    made: dict[str, ParallelStyle] = {}
    seen: set[str] = set()
    for path, style in plan.items():
        found = {name for name in layers if name.count(".") == path.count(".") and fnmatch(name, path)}
        made |= _styles(path, style) if found else {path: style}
        seen |= found
    if left := sorted(layers.keys() - seen):
        raise NotSupported(
            f"the plan of tensor parallelism does not split {left[0]}, which policy.lora.target_modules names; take "
            "it out there, or set policy.parallelism.tensor to 1"
        )
    return made


def _styles(path: str, style: ParallelStyle) -> Mapping[str, ParallelStyle]:
    base, down, up = f"{path}.base_layer", f"{path}.lora_A.{ADAPTER}", f"{path}.lora_B.{ADAPTER}"
    if type(style) is ColwiseParallel and style.input_layouts == (WHOLE,) and style.use_local_output:
        columns = ColwiseParallel(output_layouts=style.output_layouts[0])
        return {base: style, down: Copied(WHOLE, local=False), up: columns}
    if type(style) is RowwiseParallel and style.use_local_output:
        between = style.output_layouts[0]
        rows = RowwiseParallel(input_layouts=style.input_layouts[0], output_layouts=between)
        return {base: style, down: rows, up: Copied(between, local=True)}
    raise NotSupported(
        f"tensor parallelism splits {path} by {type(style).__name__}, which adapters cannot follow; take it out of "
        "policy.lora.target_modules, or set policy.parallelism.tensor to 1"
    )
