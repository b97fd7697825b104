"""Activation checkpointing of transformers models: each block recomputes in the backward what it did not keep.

`full` keeps only a block's inputs, and runs its forward a second time. `selective` also keeps the results of matrix
products and attention kernels, so that only norms, rotary embeddings and activation functions run again.

Collectives inside a block, such as the gathering of keys and values in context parallelism, are repeated by both: their
results are as large as the whole sequence's keys and values, and one gather per block is cheap beside the attention.
"""

from __future__ import annotations

from typing import Any, Literal

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Mode = Literal["selective", "full"]

KEPT = frozenset(
    (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::linear",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    )
)
"""The operators whose results `selective` keeps."""


def checkpoint_activations(model: Any, mode: Mode) -> None:
    """Enable activation checkpointing in the blocks of `model`; call this before the model is sharded."""
    keys: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        keys["context_fn"] = selective_contexts
    # newer versions of transformers use the first name, older ones the second
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(keys)


def selective_contexts() -> tuple[Any, Any]:
    """Return the contexts of a block's forward and of its recomputation: the `context_fn` of torch's `checkpoint`."""
    return create_selective_checkpoint_contexts(_keep_or_recompute)


def _keep_or_recompute(_context: Any, operator: Any, *_args: Any, **_keys: Any) -> CheckpointPolicy:
    kept = operator.name().partition(".")[0] in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
