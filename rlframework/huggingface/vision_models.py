"""Kinds of vision-language models of transformers: their image processors, and facts that configurations do not say.

A kind is a `model_type`. Each entry was compared with a plain forward, row by row (`plugins/dtensor/tests`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlframework.base.errors import DataError
from rlframework.huggingface.hub import local_files_only, quiet_hub
from rlframework.huggingface.model_directories import first_size

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


_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_NEEDED = "get_text_with_replacements"
"""A method of processors since transformers 5.24, by which they tell what replaces the placeholder of each image."""


def load_processor(name: str, config: Any, tokenizer: Any) -> Any:
    """Load the processor of the model `name`, which has `config`, with `tokenizer` in place of its own.

    Raises a `DataError` if transformers knows none for this kind of model, or it cannot be loaded.
    """
    import transformers
    from transformers.models.auto import processing_auto

    known: Any = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    kind = known.get(config.model_type)
    if kind is None:
        raise DataError(
            f"environment.images is set, but a {config.model_type} model takes no images that transformers has a "
            f"processor for; set policy.model_name={name!r} to a vision-language model, or remove environment.images"
        )
    try:
        with quiet_hub():
            made = _without_videos(getattr(transformers, kind)).from_pretrained(
                name, local_files_only=local_files_only(name)
            )
    except Exception as error:  # transformers raises anything, also for packages that are missing
        raise DataError(
            f"the image processor of policy.model_name={name!r} ({kind}) cannot be loaded: {error!s:.500}. Its files "
            "are preprocessor_config.json or processor_config.json; some kinds need further packages, such as "
            "torchvision"
        ) from error
    if not hasattr(made, _NEEDED):
        raise DataError(f"images need transformers 5.24 or later; this is {transformers.__version__}")
    made.tokenizer = tokenizer
    return made


def copy_processor(name: str, folder: Path) -> None:
    """Copy the files of the processor of the model `name`, if it has any, into `folder`."""
    from transformers.utils.hub import cached_file

    for file in _FILES:
        found = Path(name) / file
        if not Path(name).is_dir():
            cached = cached_file(
                name,
                file,
                local_files_only=True,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            found = Path(cached or file)
        if found.is_file():
            shutil.copyfile(found, folder / file)


def _without_videos(kind: type[Any]) -> type[Any]:
    """Return the class `kind` without a video processor, which needs packages that images do not need."""

    def get_attributes(cls: Any) -> list[str]:
        return [name for name in kind.get_attributes() if name != "video_processor"]

    return type(kind.__name__, (kind,), {"get_attributes": classmethod(get_attributes)})


def image_tokens(config: Any) -> list[int]:
    """Return the tokens that stand for features of images, videos or sounds in a model of `config`; none for text."""
    names = [f"{medium}_token_{end}" for medium in ("image", "video", "audio") for end in ("id", "index")]
    found = {getattr(config, name, None) for name in names}
    return sorted(token for token in found if isinstance(token, int) and token >= 0)


def never_sampled(config: Any) -> list[int]:
    """Return the `image_tokens` that the vocabulary has: models may have none for a medium that they do not take."""
    size = first_size(config.get_text_config(), "vocab_size")
    return [token for token in image_tokens(config) if size is None or token < size]


def image_token(config: Any) -> int:
    """Return the token that stands for a feature of an image in a model of `config`."""
    found: Any = getattr(config, "image_token_id", None)
    return int(config.image_token_index if found is None else found)
