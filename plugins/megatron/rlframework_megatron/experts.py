"""Parts of mixtures of experts that megatron-core lacks: routers with a bias, and experts as gpt-oss has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlframework_megatron.upstream import MegatronModule, TopKRouter, TransformerConfig


class BiasedRouter(TopKRouter):  # type: ignore[misc]  # megatron-core carries no types
    """A router with a bias. Constructor arguments: those of megatron-core's."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self.bias = nn.Parameter(torch.zeros(config.num_moe_experts, dtype=config.params_dtype))
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class StackedExperts(MegatronModule):  # type: ignore[misc]  # megatron-core carries no types
    """Experts of gpt-oss, with biases and clamped activations, in parameters of the layout of its files.

    `gate_up_proj [E, H, 2 I]` has gates in even columns. All experts are on each rank. Constructor arguments: those
    that megatron-core passes to experts; `alpha` and `limit` are of the activation.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        alpha: float,
        limit: float,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        count, hidden, size, dtype = (
            num_local_experts,
            config.hidden_size,
            config.moe_ffn_hidden_size,
            config.params_dtype,
        )
        self.alpha, self.limit = alpha, limit
        self.gate_up_proj = nn.Parameter(torch.zeros(count, hidden, 2 * size, dtype=dtype))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(count, 2 * size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.zeros(count, size, hidden, dtype=dtype))
        self.down_proj_bias = nn.Parameter(torch.zeros(count, hidden, dtype=dtype))

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Return the outputs `[N, H]` of `tokens [N, H]`, sorted by expert, times their `weights [N]`, and no bias."""
        outputs = [self._expert(expert, part) for expert, part in enumerate(tokens.split(tokens_per_expert.tolist()))]
        return (torch.cat(outputs) * weights[:, None]).to(tokens.dtype), None

    def _expert(self, expert: int, tokens: Tensor) -> Tensor:
        gate_up = torch.addmm(self.gate_up_proj_bias[expert], tokens, self.gate_up_proj[expert])
        gate = gate_up[:, ::2].clamp(max=self.limit)
        up = gate_up[:, 1::2].clamp(-self.limit, self.limit)
        hidden = (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
        return torch.addmm(self.down_proj_bias[expert], hidden, self.down_proj[expert])
