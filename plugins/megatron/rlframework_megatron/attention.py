"""Core attention for padded rows, packed rows, and rows split across context-parallel ranks.

Megatron-core's own attention without Transformer Engine supports padded rows only and materialises the scores. The
layout of a row is passed as `attention_bias`, an argument that megatron-core forwards from the model to each layer and
passes again when it recomputes activations; the supported models have no attention bias.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rlframework.models.attention import RowLayout
from rlframework_megatron.upstream import MegatronModule, TransformerConfig


class CoreAttention(MegatronModule):  # type: ignore[misc]  # megatron-core carries no types
    """Causal attention without parameters. Constructor arguments: those that megatron-core's layer passes."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any
    ) -> None:
        super().__init__(config=config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: RowLayout | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend with `query [L, n, heads, D]`, `key` and `value [L, n, kv_heads, D]`; return `[L, n, heads * D]`.

        `attention_bias`: the sequences of a packed row, or this rank's shard of context-parallel rows; None: rows
        padded on the right, for which causal attention needs no mask.
        """
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))  # [n, heads, L, D]
        if attention_bias is not None:
            found = attention_bias.attend(q, k, v)  # [n, L, heads, D]
        else:
            found = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            ).transpose(1, 2)
        return found.transpose(0, 1).flatten(2)
