"""Facts about kinds of vision-language models of transformers that their configurations do not say.

A kind is a `model_type`. Each entry was compared with a plain forward, row by row (`plugins/dtensor/tests`).
"""

from __future__ import annotations

from typing import Any

PACKS_IMAGES = frozenset(
    {"idefics3", "internvl", "llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm"},
)
"""Kinds whose rows with images may be packed: all tokens attend causally, so a packed row needs no other mask."""

TOKEN_TYPES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "mm_token_type_ids"),
    "gemma3": "token_type_ids",
}
"""The column of a batch that tells image tokens from text: for positions of patches (M-RoPE), or for the mask."""


def packs_images(config: Any) -> bool:
    """Return True if rows with images of a model of the transformers `config` may be packed."""
    return config.model_type in PACKS_IMAGES
