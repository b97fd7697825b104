"""The oracle of Muon: `torch.optim.Muon` on the whole matrices of the layers, in one process.

Like `oracle`, it imports nothing of rlframework except that module (enforced by import-linter).
"""

from __future__ import annotations

from typing import Any

import torch

from rlframework_conformance.oracle import Oracle, OracleStep

ENDS = ("embed_tokens.weight", "lm_head.weight")


class MuonOracle(Oracle):
    """The model at `path` with Muon for the matrices of its layers, and AdamW for embedding, head and vectors.

    `momentum`: decay of Muon's average of gradients; `settings` are those of `Oracle`.
    """

    def __init__(self, path: Any, *, momentum: float, **settings: Any) -> None:
        super().__init__(path, **settings)
        given = self.optimizer.param_groups[0]
        named = list(self.model.named_parameters())
        matrices = [parameter for name, parameter in named if parameter.dim() == 2 and not name.endswith(ENDS)]
        self.muon = torch.optim.Muon(
            matrices,
            lr=given["lr"],
            weight_decay=given["weight_decay"],
            momentum=momentum,
            nesterov=True,
            adjust_lr_fn="match_rms_adamw",
        )
        taken = set(map(id, matrices))
        for group in self.optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in taken]

    def descend(self, loss: float, lr: float | None = None) -> OracleStep:
        """Take a step on the parameters' current gradients, which belong to `loss`."""
        step = super().descend(loss, lr)  # clips all gradients
        for group in self.muon.param_groups if lr is not None else ():
            group["lr"] = lr
        self.muon.step()
        return step
