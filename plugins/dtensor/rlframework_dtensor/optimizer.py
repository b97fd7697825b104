"""The optimizer of a sharded model: torch's AdamW, or Muon for the matrices of the layers beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.config.policy import OptimizerConfig
from rlframework.engine import layer_matrices, parameter_groups
from rlframework_dtensor.shards import gather_full, local_slices, local_tensor, with_local


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer `config.name` of the trainable parameters of `model`."""
    if config.name == "muon":
        return MuonWithAdamW(model, config)
    return _adamw(model.named_parameters(), config)


def _adamw(named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> torch.optim.AdamW:
    groups = parameter_groups(named_parameters, config)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the layers, and AdamW for all other parameters. `step` is collective.

    `torch.optim.Muon` on the weights of a single process defines the result. Its direction depends on all elements of
    a matrix, so the averaged gradient of each matrix is gathered for it, one matrix at a time; average, weight decay
    and update are computed on shards. A matrix's state has its `step` and the average, `exp_avg`.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        matrices = layer_matrices(model)
        taken = set(map(id, matrices))
        self._adamw = _adamw((one for one in model.named_parameters() if id(one[1]) not in taken), config)
        own = {"params": matrices, "lr": config.lr, "weight_decay": config.weight_decay, "momentum": config.momentum}
        super().__init__([own, *self._adamw.param_groups], {})
        self._adamw.state = self.state
        for matrix in matrices:
            self.state[matrix] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(matrix, requires_grad=False)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient. `closure` must be None."""
        assert closure is None
        group = self.param_groups[0]
        for matrix in group["params"]:
            if matrix.grad is not None:
                self._update(matrix, group)
        self._adamw.step()

    def _update(self, matrix: Tensor, group: dict[str, Any]) -> None:
        assert matrix.grad is not None
        state, gradient, shard = self.state[matrix], local_tensor(matrix.grad), local_tensor(matrix)
        average = local_tensor(state["exp_avg"]).lerp_(gradient, 1 - group["momentum"])
        ahead = with_local(matrix, gradient.lerp(average, group["momentum"]))  # Nesterov's
        update = muon_update(gather_full(ahead), group["lr"])
        shard.mul_(1 - group["lr"] * group["weight_decay"])
        shard.add_(update[local_slices(matrix)].to(shard.device))
        state["step"] += 1


def muon_update(average: Tensor, lr: float) -> Tensor:
    """Return the change of a matrix `[m, n]` that `torch.optim.Muon` makes for an averaged gradient.

    The average orthogonalized, with the RMS of AdamW's updates: times -0.2 lr sqrt(max(m, n)) (arXiv:2502.16982).
    """
    change = nn.Parameter(torch.zeros_like(average))
    change.grad = average
    torch.optim.Muon(
        [change], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
    ).step()
    return change.detach()
