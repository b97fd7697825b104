"""Expert parallelism: the experts of a mixture spread over ranks that have rows of their own.

Each rank of the group has some of the experts of each block, sends its tokens to the ranks whose experts they were
routed to (an exchange of unequal parts), computes what it was sent, and sends it back. The router and all else is on
each rank, as without it. A rank with few tokens takes part all the same, so that all run the same exchanges.

FSDP shards a rank's experts over the ranks that have the same ones (its own divisor of gradients, which torch 2.13 has,
divides twice where that is one rank alone). Left out: a limit on the tokens of an expert (none
are dropped), and tensor, context and hybrid parallelism beside it, which `mesh` refuses.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rlframework.errors import ConfigError
from rlframework_dtensor.config import experts_problem
from rlframework_dtensor.styles import cut

ALL_TO_ALL = dist.all_to_all_single
WEIGHTS = ("gate_up_proj", "down_proj")


def require_experts(config: Any, expert: int, router_loss: bool) -> None:
    """A `ConfigError` where a model of `config` has no experts that `expert` ranks can share. Loads nothing.

    `router_loss`: they must be there for one rank too.
    """
    text = config.get_text_config()
    problem = experts_problem(
        {"model_type": text.model_type, "num_experts": getattr(text, "num_experts", None)}, expert
    )
    if problem and (expert > 1 or router_loss):
        key = f"policy.parallelism.expert={expert}" if expert > 1 else "policy.router_aux_loss_coef"
        raise ConfigError(f"{key} cannot be: {problem}; set it to {1 if expert > 1 else 0}")


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` that hold the experts of a block."""
    return [module for name, module in model.named_modules() if name.endswith(".mlp.experts")]


def spread(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each rank of the 1-D `mesh` its experts of each block of `model`, in place; before FSDP, on any device."""
    for module in experts_of(model):
        ordinary = type(module).forward
        for name in WEIGHTS:
            cut(module, name, mesh, Shard(0))
        module.forward = _Spread(module, ordinary, mesh.get_group())


class _Spread:
    """The forward of the experts of a block, of which this rank has some: takes and gives what the module's does."""

    def __init__(self, module: Any, ordinary: Any, group: dist.ProcessGroup) -> None:
        self._module, self._ordinary, self._group = module, ordinary, group
        self._ranks = dist.get_world_size(group)
        self._own = module.num_experts // self._ranks

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`hidden_states [T, H]`, `top_k_index [T, K]` over all experts, `top_k_weights [T, K]`; `[T, H]`."""
        tokens, choices = top_k_index.shape
        order = top_k_index.reshape(-1).argsort(stable=True)  # by expert, so by rank
        counts = torch.bincount(top_k_index.reshape(-1), minlength=self._own * self._ranks)
        theirs = torch.empty_like(counts)
        ALL_TO_ALL(theirs, counts, group=self._group)  # of my experts, from each rank
        theirs = theirs.view(self._ranks, self._own)
        sent, received = counts.view(self._ranks, self._own).sum(1).tolist(), theirs.sum(1).tolist()

        rows = _exchange(hidden_states[order // choices], sent, received, self._group)
        own = torch.arange(self._own, device=rows.device).repeat(self._ranks).repeat_interleave(theirs.reshape(-1))
        back = _exchange(self._computed(rows, own), received, sent, self._group)

        answers = torch.empty_like(back).index_copy(0, order, back).view(tokens, choices, -1)
        return (answers * top_k_weights[..., None].to(answers.dtype)).sum(1)

    def _computed(self, rows: Tensor, experts: Tensor) -> Tensor:
        """`rows [N, H]`, each through the expert of this rank that `experts [N]` names, by the module's own forward.

        One row of zeros goes along, so that the weights have a gradient where no token came.
        """
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
        experts = torch.cat((experts, experts.new_zeros(1)))
        ones = rows.new_ones(len(rows), 1)
        answers: Tensor = self._ordinary(self._local(), rows, experts[:, None], ones)
        return answers[:-1]

    def _local(self) -> SimpleNamespace:
        """What the module's forward reads of it, with this rank's experts as plain tensors.

        Their gradient comes of the tokens of all ranks, but FSDP takes the mean over those with the same experts only,
        so it is divided by the rest here.
        """
        module = self._module
        weights = {name: getattr(module, name) for name in WEIGHTS}
        parts = {name: part.to_local() if isinstance(part, DTensor) else part for name, part in weights.items()}
        local = {name: _with_gradient(part, 1.0 / self._ranks) for name, part in parts.items()}
        names = ("config", "act_fn", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
        kept = {name: getattr(module, name) for name in names if hasattr(module, name)}
        return SimpleNamespace(
            **kept,
            **local,
            num_experts=self._own,
            _is_expert_parallel=False,  # to the forward these are all that there are
            _apply_gate=module._apply_gate,
        )


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """The first `sent[0]` rows to rank 0, the next to rank 1, ...; what came, by rank. Differentiable, collective."""
    found: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return found


def _with_gradient(tensor: Tensor, factor: float) -> Tensor:
    """`tensor`, whose gradient is multiplied by `factor` on the way back."""
    found: Tensor = _Scaled.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return found


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _moved(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _moved(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _moved(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    found = rows.new_empty((sum(received), rows.shape[1]))
    ALL_TO_ALL(found, rows.contiguous(), received, sent, group=group)
    return found
