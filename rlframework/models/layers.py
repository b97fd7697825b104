"""The decoder layers of a transformers model: the units of FSDP and of activation checkpointing."""

from __future__ import annotations

from typing import Any

from torch import nn

from rlframework.models.loading import is_multimodal


def checkpoint_activations(model: Any) -> None:
    """Enable activation checkpointing: keep only the inputs of the layers and recompute the rest in the backward."""
    # newer versions of transformers use the first name, older ones the second
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the layers that FSDP gathers one at a time: modules of the classes that the model says not to split.

    For a multimodal model, only those of its language model. All ranks must run a layer to gather it, and not every
    rank has an image for the vision tower, so the vision weights are gathered with the root's.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    text = model.get_decoder() if is_multimodal(model) else model
    return [module for module in text.modules() if type(module).__name__ in names]
