"""The core attention of our layers: padded rows, packed rows by segments, and rows that ranks share along the sequence.

Megatron-core's own without Transformer Engine knows padded rows alone, and holds the scores. What a row is made of
comes as `attention_bias`, an argument that megatron-core hands from the model to each layer, and to each one again
where activations are computed anew; there is no bias in the models here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rlframework.models.attention import Segments, segment_attention
from rlframework.models.context_parallel import Share, context_attention
from rlframework_megatron.upstream import MegatronModule, TransformerConfig


class CoreAttention(MegatronModule):  # type: ignore[misc]  # megatron-core carries no types
    """Causal attention of some heads; no parameters. Arguments: as megatron-core's layer makes it."""

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
        attention_bias: Segments | Share | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """`query [L, n, heads, D]`, `key` and `value [L, n, kv_heads, D]`; returns `[L, n, heads * D]`.

        `attention_bias`: the sequences of a packed row, or what this rank has of rows that ranks share; None: rows
        padded on the right, for which causal attention needs no mask.
        """
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))  # [n, heads, L, D]
        if isinstance(attention_bias, Segments):
            found, _ = segment_attention(self, q, k, v, None, segments=attention_bias)  # [n, L, heads, D]
        elif attention_bias is not None:
            found, _ = context_attention(self, q, k, v, None, context_share=attention_bias)
        else:
            found = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            ).transpose(1, 2)
        return found.transpose(0, 1).flatten(2)
