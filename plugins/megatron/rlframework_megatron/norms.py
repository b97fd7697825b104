"""RMSNorms in fp32, with the constructor arguments that megatron-core passes to norms."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlframework_megatron.upstream import (
    MegatronModule,
    TransformerConfig,
    make_sharded_tensors_for_checkpoint,
    parallel_state,
    set_tensor_model_parallel_attributes,
)


class RMSNorm(nn.Module):
    """RMSNorm of Llama and Qwen, computed in fp32; under sequence parallelism tensor ranks sum its gradient."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self._recomputes = config.recompute_granularity == "selective"
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise `hidden [..., H]` over the last dimension."""
        if self._recomputes and torch.is_grad_enabled():
            normed: Tensor = checkpoint(self._normalise, hidden, use_reentrant=False, preserve_rng_state=False)
            return normed
        return self._normalise(hidden)

    def _normalise(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == torch.float32:
            return nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        # rounded before the weight, as transformers does
        normed = nn.functional.rms_norm(hidden.float(), self.weight.shape, None, self.eps)
        return self.weight * normed.to(hidden.dtype)


class ExactRMSNorm(RMSNorm):
    """RMSNorm of OLMo and gpt-oss: rounded after the weight."""

    def _normalise(self, hidden: Tensor) -> Tensor:
        weight = self.weight.float()
        return nn.functional.rms_norm(hidden.float(), weight.shape, weight, self.eps).to(hidden.dtype)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm of Gemma: multiplied with 1 plus the weight."""

    def _normalise(self, hidden: Tensor) -> Tensor:
        weight = 1.0 + self.weight.float()
        return nn.functional.rms_norm(hidden.float(), weight.shape, weight, self.eps).to(hidden.dtype)


NORMS: dict[str, type[RMSNorm]] = {"rounded": RMSNorm, "exact": ExactRMSNorm, "offset": OffsetRMSNorm}
"""The norms by `Architecture.norm`."""


class AllHeadsNorm(MegatronModule):  # type: ignore[misc]  # megatron-core carries no types
    """The norm of OLMo over all heads of the queries, or keys; tensor ranks have their heads' part of the weight.

    `heads`: their number on all ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int) -> None:
        super().__init__(config=config)
        size = config.tensor_model_parallel_size
        self.eps, self._width = eps, heads * hidden_size
        self._group = parallel_state.get_tensor_model_parallel_group() if size > 1 else None
        self.weight = nn.Parameter(torch.ones(self._width // size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise `heads [L, n, h, D]`, this rank's, over the heads of all ranks."""
        flat = heads.flatten(-2).float()
        squares = flat.square().sum(-1, keepdim=True)
        if self._group is not None:
            squares = _SumOverRanks.apply(squares, self._group)  # type: ignore[no-untyped-call]
        normed = flat * torch.rsqrt(squares / self._width + self.eps)
        return (self.weight * normed).to(heads.dtype).view(heads.shape)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Megatron-core's state for its checkpoints."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


class _SumOverRanks(torch.autograd.Function):
    """Sum over the ranks of a group; each rank's output depends on all inputs, so the backward sums as well."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, total = group, tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
