"""The load-balancing loss of `rlframework.models.load_balancing` for megatron-core's routers.

Megatron-core's own losses are per microbatch; the framework's covers the whole global batch. Does not support models
whose layers or sequences are split across ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlframework.engine import LoadBalancingLoss
from rlframework_megatron.model import Chunk
from rlframework_megatron.upstream import TopKRouter

if TYPE_CHECKING:
    import torch.distributed as dist


class MegatronLoadBalancingLoss(LoadBalancingLoss):
    """Records the routers of `chunk`, a whole model. `group`: the data-parallel ranks; None if there is only one."""

    def __init__(self, chunk: Chunk, group: dist.ProcessGroup | None) -> None:
        self._experts, self._group = int(chunk.config.num_moe_experts), group
        self._chosen = int(chunk.config.moe_router_topk)
        self._recording = False
        self._routed: list[tuple[Tensor, Tensor]] = []
        chunk.register_forward_pre_hook(self._begin)
        chunk.register_forward_hook(self._end)
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.routing = self._record_routing(module.routing)

    def _record_routing(self, routing: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        """Wrap a router's `routing` to record its logits `[L, n, N]` and chosen experts."""

        def recorded_routing(logits: Tensor, *arguments: Any, **more: Any) -> tuple[Tensor, Tensor]:
            probabilities, choices = routing(logits, *arguments, **more)
            if logits.requires_grad:  # megatron-core's backward depends on the gradient's memory layout
                logits.register_hook(lambda gradient: gradient.contiguous())
            by_rows = logits.transpose(0, 1).reshape(-1, self._experts)
            is_chosen = choices.view(logits.shape).transpose(0, 1).reshape(-1, self._experts)
            # the number of chosen experts is known, so that nothing waits for the device, as `nonzero` would
            chosen = is_chosen.byte().argsort(dim=-1, descending=True, stable=True)[:, : self._chosen]
            self._keep(None, None, (by_rows, probabilities, chosen))  # type: ignore[arg-type]
            return probabilities, choices

        return recorded_routing
