"""The loss that evens out the work of experts, `rlframework.models.load_balancing`, of megatron-core's routers.

Megatron-core has losses of its own for it, of each microbatch by itself; core's is of the whole global batch. Left out:
models whose layers or sequences several ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlframework.interfaces.data_processor import Microbatch
from rlframework.models.load_balancing import RouterLoss
from rlframework.policy.engine import Step, StepResult
from rlframework_megatron.model import Chunk
from rlframework_megatron.upstream import TopKRouter

if TYPE_CHECKING:
    import torch.distributed as dist

    from rlframework.policy.head.request import HeadOutput


class MegatronRouterLoss(RouterLoss):
    """Watches the routers of `chunk`, a whole model; `group`: the ranks with other rows, None where there are none."""

    def __init__(self, chunk: Chunk, group: dist.ProcessGroup | None) -> None:
        self._experts, self._group = int(chunk.config.num_moe_experts), group
        self._watching = False
        self._seen: list[tuple[Tensor, Tensor]] = []
        chunk.register_forward_pre_hook(self._begin)
        chunk.register_forward_hook(self._end)
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.routing = self._watched(module.routing)

    def _watched(self, routing: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        """`routing` of a router, of which the logits `[L, n, N]` and the choices are kept."""

        def watched(logits: Tensor, *arguments: Any, **more: Any) -> tuple[Tensor, Tensor]:
            probabilities, choices = routing(logits, *arguments, **more)
            if logits.requires_grad:  # megatron-core's backward looks at the gradient as it lies in memory
                logits.register_hook(lambda gradient: gradient.contiguous())
            by_rows = logits.transpose(0, 1).reshape(-1, self._experts)
            chosen = choices.view(logits.shape).transpose(0, 1).reshape(-1, self._experts).nonzero()[:, 1]
            self._keep(None, None, (by_rows, probabilities, chosen.view(len(by_rows), -1)))  # type: ignore[arg-type]
            return probabilities, choices

        return watched

    def added_to(
        self, step: Step, microbatches: Sequence[Microbatch], forward: Callable[[Microbatch], Any], coefficient: float
    ) -> Step:
        """`step`, and `coefficient` times the part of the routers' loss that its microbatch has. Collective.

        `forward` runs the model over a microbatch without gradient, once before the step.
        """
        balance = self.balance(microbatches, forward)

        def with_part(output: HeadOutput, microbatch: Microbatch) -> StepResult:
            result, part = step(output, microbatch), self.part(microbatch, balance)
            assert result.loss is not None
            result.loss = result.loss + coefficient * part
            if not microbatch.is_dummy:
                result.outputs["router_aux_loss"] = part.detach()
            return result

        return with_part
