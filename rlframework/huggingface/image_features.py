"""How many features the image encoder of a model makes of its inputs, from the configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


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
