"""The MLP of dense layers under `policy.activation_checkpointing: selective`, which megatron-core has for experts only.

The activation is neither kept for its own backward nor as the input of the second matrix product: the backward computes
it again from the result of the first one. Of `4 F` numbers a token, F the MLP's width, `2 F` are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlframework_megatron.upstream import MLP, CheckpointWithoutOutput, bias_swiglu_impl


class RecomputedMLP(MLP):  # type: ignore[misc]  # megatron-core carries no types
    """Megatron-core's gated MLP; the result of the activation is recomputed in the backward."""

    def forward(self, hidden: Tensor, per_token_scale: None = None, **_: Any) -> tuple[Tensor, Tensor | None]:
        """Return the output `[L, n, H]` for `hidden [L, n, H]`, and its bias, if any."""
        gates, bias = self.linear_fc1(hidden)
        activation = CheckpointWithoutOutput(fp8=None)  # False means True
        gates = gates if bias is None else gates + bias
        output, bias = self.linear_fc2(activation.checkpoint(self._activate, gates))
        activation.discard_output_and_register_recompute(output)
        return output, bias

    def _activate(self, gates: Tensor) -> Tensor:
        if self.config.bias_activation_fusion:
            fused: Tensor = bias_swiglu_impl(gates, None)
            return fused
        gate, up = torch.chunk(gates, 2, dim=-1)
        activated: Tensor = self.config.activation_func(gate) * up
        return activated
