"""Kinds of vision-language models of transformers: features of an image, and facts that configurations do not say.

A kind is a `model_type`. Each entry was compared with a plain forward, row by row (`plugins/dtensor/tests`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

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


def image_inputs(config: Any) -> dict[str, Any]:
    """Return what the transformers `config` says of the images that a model takes, and of their tokens, by key.

    Two models with equal values take each other's images.
    """
    vision, found = getattr(config, "vision_config", None), {"model_type": config.model_type}
    for part, keys in ((config, _OF_TOKENS), (vision, _OF_PATCHES)):
        found |= {key: value for key in keys if (value := getattr(part, key, None)) is not None}
    return found


_OF_TOKENS = ("image_token_id", "image_token_index", "scale_factor", "downsample_ratio", "mm_tokens_per_image")
_OF_PATCHES = ("image_size", "patch_size", "temporal_patch_size", "spatial_merge_size")


def scoring_architecture(config: Any) -> str:
    """Return the name of the class of a model of the transformers `config` whose head gives numbers.

    transformers has it, or else `rlframework.models.vision_heads` makes it of a vision-language kind.
    """
    import transformers

    found: Any = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if found is not None:
        return str(found.__name__)
    language: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    return str(language.__name__).partition("For")[0] + "ForSequenceClassification"


def count_features(config: Any, inputs: Mapping[str, Tensor]) -> int | None:
    """Return the number of features of the images in `inputs`, as the processor made them; None for unknown kinds.

    Kinds with a grid (Qwen2-VL and its relatives) make one of `spatial_merge_size ** 2` patches, others the same number
    of each picture or tile.
    """
    grid = inputs.get("image_grid_thw")
    if grid is not None:
        merge = getattr(config.vision_config, "spatial_merge_size", None)
        return None if merge is None else int(grid.prod(-1).sum()) // merge**2
    per_tile = _features_of_a_tile(config)
    pixels = inputs.get("pixel_values")
    if per_tile is None or pixels is None:
        return None
    return per_tile * int(pixels.shape[:-3].numel())


def _features_of_a_tile(config: Any) -> int | None:
    kind = config.model_type
    if kind == "gemma3":
        return int(config.mm_tokens_per_image)
    if kind not in ("idefics3", "smolvlm", "internvl", "llava"):
        return None
    size, patch = (_pair(getattr(config.vision_config, name)) for name in ("image_size", "patch_size"))
    patches = (size[0] // patch[0]) * (size[1] // patch[1])
    if kind == "internvl":
        return int(patches * config.downsample_ratio**2)
    if kind == "llava":
        return int(patches + (config.vision_feature_select_strategy == "full"))
    return int(patches // config.scale_factor**2)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
