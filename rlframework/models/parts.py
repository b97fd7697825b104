"""The parts of a vision-language model: its image encoder and its language model.

A projector that is a module of its own, as in LLaVA, belongs to neither part; the Qwen-VL kinds have it in the encoder.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from rlframework.base.errors import NotSupported
from rlframework.config.policy import PolicyConfig
from rlframework.models.loading import is_multimodal


def modules_of_part(model: Any, part: str) -> tuple[nn.Module, ...]:
    """Return the modules of `part`, "vision" (the image encoder) or "language" (decoder, embedding and head).

    Raises `NotSupported` for a model without such a part.
    """
    encoder = model.get_encoder(modality="image") if is_multimodal(model) else model
    if encoder is model or encoder is model.base_model:
        raise NotSupported(
            f"{type(model).__name__} has no image encoder; remove policy.freeze, and set policy.lora.part to all"
        )
    return (encoder,) if part == "vision" else (model.get_decoder(), model.get_output_embeddings())


def freeze_part(model: Any, part: str) -> None:
    """Freeze all parameters of `part`; see `modules_of_part`. Repeat after sharding, which replaces parameters."""
    for module in modules_of_part(model, part):
        module.requires_grad_(False)


def trains_images_only(config: PolicyConfig) -> bool:
    """Return True if rows of text train nothing, because the language model is frozen."""
    return config.freeze == "language" or (config.lora is not None and config.lora.part == "vision")
