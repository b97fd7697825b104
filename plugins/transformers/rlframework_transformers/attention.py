"""Attention of the decoding loop on an accelerator, registered with transformers: what "sdpa" computes, with less.

For a batch with padding, "sdpa" asks the device for each token whether the mask hides anything, which makes the host
wait. Also, that of transformers 5.17 copies keys and values for each query head that shares them: with 2 query heads
to a key-value head it reads or writes five times the cache's bytes for each token, with 8 heads 17 times (5.23 does
not).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "rlframework_decoding"
_OTHER_SCORES = ("position_bias", "softcap", "s_aux")


@contextmanager
def decoding_attention(config: Any, device: torch.device) -> Iterator[None]:
    """Switch models of `config` from "sdpa" to `ATTENTION`; leaves other attentions, and a CPU's, as they are."""
    text = config.get_text_config()
    previous = text._attn_implementation
    if device.type == "cpu" or previous != "sdpa":
        yield
        return
    AttentionInterface.register(ATTENTION, grouped_attention)
    AttentionMaskInterface.register(ATTENTION, padding_mask)
    text._attn_implementation = ATTENTION
    try:
        yield
    finally:
        text._attn_implementation = previous


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' "sdpa": `query [B, heads, Q, D]`, output `[B, Q, heads, D]`.

    With one query per row and a mask, `[B, 1, 1, S]`, the query heads of a key-value head are computed as its queries,
    so that no key or value is copied. Without a mask torch's kernels share them by themselves.
    """
    batch, heads, queries, size = query.shape
    own_kind = any(kwargs.get(name) is not None for name in _OTHER_SCORES)
    if queries != 1 or attention_mask is None or attention_mask.shape[1] != 1 or own_kind:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.reshape(batch, key.shape[1], -1, size)
    output = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, -1), None


def padding_mask(*, attention_mask: Tensor | None, allow_is_causal_skip: bool = True, **kwargs: Any) -> Tensor | None:
    """Make the mask of "sdpa"; if `attention_mask [B, S]` is given, without asking whether it hides anything."""
    kwargs["allow_is_causal_skip"] = allow_is_causal_skip and attention_mask is None
    return sdpa_mask(attention_mask=attention_mask, **kwargs)
