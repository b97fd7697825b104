"""A tensor-parallel plan for Llama, which a test names by its import path."""

from __future__ import annotations

from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel


def only_the_mlp() -> dict[str, ParallelStyle]:
    """Attention is computed by every rank."""
    block = "model.layers.*.mlp"
    return {
        f"{block}.gate_proj": ColwiseParallel(),
        f"{block}.up_proj": ColwiseParallel(),
        f"{block}.down_proj": RowwiseParallel(),
    }
