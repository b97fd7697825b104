"""Expert parallelism: the experts of a mixture-of-experts model are sharded over data-parallel ranks.

Each rank of the group holds some of the experts of each block. It sends its tokens to the ranks that hold the experts
to which they were routed (an all-to-all with uneven splits), runs the tokens it receives, and sends the results back.
The router and everything else are on each rank, as without expert parallelism. A rank with few tokens takes part in
every exchange.

FSDP shards a rank's experts over the ranks that hold the same ones. (FSDP's own gradient divisor in torch 2.13 divides
twice if that is a single rank.) Not supported: a capacity limit per expert (no tokens are dropped), and tensor, context
or hybrid parallelism at the same time, which `mesh` rejects.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rlframework.base.errors import ConfigError
from rlframework_dtensor.config import experts_problem
from rlframework_dtensor.styles import shard_parameter

ALL_TO_ALL = dist.all_to_all_single
WEIGHTS = ("gate_up_proj", "down_proj")


def require_experts(config: Any, expert: int, router_loss: bool) -> None:
    """Raise a `ConfigError` if `expert` ranks cannot share the experts of the model that `config` describes.

    Loads nothing. `router_loss`: the model must have experts even for a single rank.
    """
    text = config.get_text_config()
    problem = experts_problem(
        {"model_type": text.model_type, "num_experts": getattr(text, "num_experts", None)}, expert
    )
    if problem and (expert > 1 or router_loss):
        key = f"policy.parallelism.expert={expert}" if expert > 1 else "policy.router_aux_loss_coef"
        raise ConfigError(f"{key} is not possible: {problem}; set it to {1 if expert > 1 else 0}")


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` that hold the experts of a block."""
    return [module for name, module in model.named_modules() if name.endswith(".mlp.experts")]


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the experts of each block of `model` in place over the 1-D `mesh`; before FSDP, on any device."""
    for module in experts_of(model):
        forward = type(module).forward
        for name in WEIGHTS:
            shard_parameter(module, name, mesh, Shard(0))
        module.forward = _ExpertParallelForward(module, forward, mesh.get_group())


class _ExpertParallelForward:
    """The forward of a block's experts if this rank holds some of them; same signature as the module's own."""

    def __init__(self, module: Any, forward: Any, group: dist.ProcessGroup) -> None:
        self._module, self._forward, self._group = module, forward, group
        self._ranks = dist.get_world_size(group)
        self._local_experts = module.num_experts // self._ranks

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`hidden_states [T, H]`, `top_k_index [T, K]` over all experts, `top_k_weights [T, K]`; `[T, H]`."""
        tokens, choices = top_k_index.shape
        chosen = top_k_index.reshape(-1)
        order = chosen.argsort(stable=True)  # by expert, so by rank
        # `bincount` would make the host wait for the largest index
        counts = chosen.new_zeros(self._ranks * self._local_experts).index_add_(0, chosen, torch.ones_like(chosen))
        received_counts = torch.empty_like(counts)
        ALL_TO_ALL(received_counts, counts, group=self._group)  # for this rank's experts, from each rank
        # the only wait of a block: the sizes of what each rank sends and receives
        both = torch.stack((counts, received_counts)).view(2, self._ranks, self._local_experts)
        sent, received = both.sum(2).tolist()

        rows = _all_to_all(hidden_states[order // choices], sent, received, self._group)
        own = (
            torch.arange(self._local_experts, device=rows.device)
            .repeat(self._ranks)
            .repeat_interleave(received_counts, output_size=len(rows))
        )
        back = _all_to_all(self._run_experts(rows, own), received, sent, self._group)

        answers = torch.empty_like(back).index_copy(0, order, back).view(tokens, choices, back.shape[1])
        return (answers * top_k_weights[..., None].to(answers.dtype)).sum(1)

    def _run_experts(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Run each row of `rows [N, H]` through the local expert `experts [N]`, with the module's own forward.

        If no token arrived, a row of zeros stands in, so that the weights get a gradient; on a CPU always, because its
        products round differently for another number of rows.
        """
        count = len(rows)
        if count == 0 or rows.device.type == "cpu":
            rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
            experts = torch.cat((experts, experts.new_zeros(1)))
        answers: Tensor = self._forward(self._local(), rows, experts[:, None], rows.new_ones(len(rows), 1))
        return answers[:count]

    def _local(self) -> SimpleNamespace:
        """The attributes that the module's forward reads, with this rank's experts as plain tensors.

        Their gradient covers the tokens of all ranks, but FSDP averages only over the ranks with the same experts, so
        the remaining divisor is applied here.
        """
        module = self._module
        weights = {name: getattr(module, name) for name in WEIGHTS}
        parts = {name: part.to_local() if isinstance(part, DTensor) else part for name, part in weights.items()}
        local = {name: _scale_gradient(part, 1.0 / self._ranks) for name, part in parts.items()}
        names = ("config", "act_fn", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
        kept = {name: getattr(module, name) for name in names if hasattr(module, name)}
        return SimpleNamespace(
            **kept,
            **local,
            num_experts=self._local_experts,
            _is_expert_parallel=False,  # the forward sees the local experts only
            _apply_gate=module._apply_gate,
        )


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send the first `sent[0]` rows to rank 0, the next to rank 1, ...; return the received rows, by rank.

    Differentiable, collective.
    """
    received_rows: Tensor = _AllToAll.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return received_rows


def _scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """`tensor`, with its gradient multiplied by `factor` in the backward."""
    scaled: Tensor = _ScaleGradient.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return scaled


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange_rows(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    output = rows.new_empty((sum(received), rows.shape[1]))
    ALL_TO_ALL(output, rows.contiguous(), received, sent, group=group)
    return output
