"""What a model of transformers can do, and what is switched on in it: packed rows, activation checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlframework.errors import NotSupported
from rlframework.models import attention as segments
from rlframework.models.context_limits import KNOWN_LAYERS
from rlframework.models.loading import is_multimodal
from rlframework.policy.head.patch import probe_ids


@torch.no_grad()
def packs(model: Any) -> bool:
    """Whether `model` keeps the sequences of a packed row apart: tried on two short ones.

    Models whose layers mix tokens by other means than attention (convolutions, linear attention), or which place
    tokens by a bias, do not. Nor do kinds of attention that `segments` does not know, such as in chunks: what they do
    to sequences longer than the two would not be seen.
    """
    if set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - KNOWN_LAYERS:
        return False
    first, second = probe_ids(model).split([4, 2])
    positions = torch.cat((torch.arange(4), torch.arange(2)))[None].to(first.device)
    alone = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in (first, second)]
    try:
        with segments.attention(model.config, segments.SEGMENTS):
            together = model(
                input_ids=torch.cat((first, second))[None],
                position_ids=positions,
                segments=segments.Segments([0, 4, 6]),
                use_cache=False,
            ).logits[0]
    except (TypeError, ValueError, KeyError, AttributeError, NotSupported):  # a model says "no" in many ways
        return False
    return torch.allclose(together, torch.cat(alone), rtol=1e-3, atol=1e-3)


def checkpoint_activations(model: Any) -> None:
    """Keep only the inputs of the blocks and compute the rest again in the backward."""
    # the first name is transformers' newer one, the second its older
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def decoder_layers(model: Any) -> list[nn.Module]:
    """The blocks that FSDP gathers one at a time: the modules whose classes the model says not to split.

    Of a multimodal model those of its language model only. A block is gathered by all ranks when it runs, and not all
    ranks may have an image for a vision tower; so its weights go with the root's.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    text = model.get_decoder() if is_multimodal(model) else model
    return [module for module in text.modules() if type(module).__name__ in names]
