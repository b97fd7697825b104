"""Tensor and sequence parallelism: shard a model's weights over the ranks that compute it together.

Blocks are sharded according to a plan (`plans`); the embedding and the head, tied or not, over the vocabulary. This
happens before FSDP, on weights that may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from rlframework.base.errors import ConfigError, NotSupported
from rlframework.engine import ADAPTER, VocabularyShard, layers_of
from rlframework.plugins.model_checks import DIVIDED, indivisible
from rlframework_dtensor.plans import make_plan
from rlframework_dtensor.styles import REPLICATED, Embedding, Plan, Replicated, shard_parameter, vocabulary_rows


def require_divisible(config: Any, tensor: int) -> None:
    """Raise a `ConfigError` if `tensor` ranks cannot share a model of `config`, before any weight is loaded."""
    if tensor == 1:  # sizes that differ by layer cannot be read
        return
    text = config.get_text_config()
    # GPT-2 has other names for some of these, to which its configuration maps them
    sizes = {name: getattr(text, name, None) for name in DIVIDED}
    problem = indivisible(sizes, tensor)
    if problem:
        raise ConfigError(f"{problem}; choose a divisor")


def apply_tensor_parallel(
    model: Any, mesh: DeviceMesh, *, sequence: bool, custom_plan: str | None
) -> VocabularyShard | None:
    """Shard `model` in place over the 1-D `mesh`; return this rank's rows of the head, for `HeadPatch` (None: all)."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    plan = make_plan(model, sequence=sequence, custom=custom_plan)
    parallelize_module(model, mesh, with_adapters(model, plan) if layers_of(model) else plan, src_data_rank=None)
    Embedding()._apply(embedding, mesh)
    if head is None:  # a reward model, whose head has one row
        return None
    _shard_head(head, embedding if tied else None, mesh)
    return VocabularyShard(mesh.get_group(), *vocabulary_rows(head.weight.shape[0], mesh))


def _shard_head(head: nn.Module, tied_to: nn.Module | None, mesh: DeviceMesh) -> None:
    if tied_to is None:
        shard_parameter(head, "weight", mesh, Shard(0))
    else:
        head.weight = tied_to.weight
    if getattr(head, "bias", None) is not None:
        shard_parameter(head, "bias", mesh, Shard(0))


def with_adapters(model: nn.Module, plan: Plan) -> Plan:
    """Extend `plan`, written for the model without adapters, to `model` with LoRA adapters.

    B is sharded like a column-sharded layer, A like a row-sharded one, so the adapter's output has the layout of the
    output that it is added to. The other matrix is replicated, and its gradient summed over the ranks.
    """
    layers = layers_of(model)
    extended: dict[str, ParallelStyle] = {}
    covered: set[str] = set()
    for path, style in plan.items():
        matches = {name for name in layers if name.count(".") == path.count(".") and fnmatch(name, path)}
        extended |= _adapter_styles(path, style) if matches else {path: style}
        covered |= matches
    if missing := sorted(layers.keys() - covered):
        raise NotSupported(
            f"the tensor-parallel plan does not shard {missing[0]}, which policy.lora.target_modules selects; leave it "
            "out there, or set policy.parallelism.tensor to 1"
        )
    return extended


def _adapter_styles(path: str, style: ParallelStyle) -> Mapping[str, ParallelStyle]:
    base, down, up = f"{path}.base_layer", f"{path}.lora_A.{ADAPTER}", f"{path}.lora_B.{ADAPTER}"
    if type(style) is ColwiseParallel and style.input_layouts == (REPLICATED,) and style.use_local_output:
        columns = ColwiseParallel(output_layouts=style.output_layouts[0])
        return {base: style, down: Replicated(REPLICATED, local=False), up: columns}
    if type(style) is RowwiseParallel and style.use_local_output:
        between = style.output_layouts[0]
        rows = RowwiseParallel(input_layouts=style.input_layouts[0], output_layouts=between)
        return {base: style, down: rows, up: Replicated(between, local=True)}
    raise NotSupported(
        f"tensor parallelism shards {path} with {type(style).__name__}, which adapters do not support; remove it from "
        "policy.lora.target_modules, or set policy.parallelism.tensor to 1"
    )
