"""What a kind of model can do, tried on a tiny one of that kind with random weights, before any weight is loaded.

The tiny model has the same classes and flags, and enough blocks that each kind of layer is there.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from rlframework.config.policy import PolicyConfig
from rlframework.errors import NotSupported
from rlframework.models import attention as segments
from rlframework.models.abilities import packs
from rlframework.models.loading import auto_class, ready
from rlframework.policy.head.patch import require_plain_head

VOCABULARY = 1024


def tiny_model(config: PolicyConfig, model_config: Any, attention: str | None) -> Any:
    """A small model of the kind of `model_config`, with the same random weights in every process, on the CPU.

    Narrower where the kind allows it, else of full width and with few blocks.
    """
    keys = {} if attention is None else {"attn_implementation": attention}
    for narrow in (True, False):
        small = _small(model_config, narrow)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                model = auto_class(small, config.head).from_config(
                    small, dtype=torch.float32, trust_remote_code=config.trust_remote_code, **keys
                )
                model = ready(model, config.head)
                with torch.no_grad():
                    model(input_ids=torch.arange(4)[None], use_cache=False)
                return model.eval()
            except (RuntimeError, ValueError, AssertionError, TypeError, IndexError, AttributeError):
                if not narrow:
                    raise
    raise AssertionError("one of the two returns or raises")


def try_kind(config: PolicyConfig, model_config: Any, device: torch.device, attention: str) -> bool:
    """Whether rows may be packed with core's attention by segments, tried where it matters; that one is registered.

    `attention`: `policy.<backend>.attention`, "auto" where the section has no such key. `NotSupported` for a model
    whose head cannot be replaced, and where rows must be packed, or sequences be split, and cannot.
    """
    segments.register()
    model = tiny_model(config, model_config, None if attention == "auto" else attention)
    if config.head == "language":
        require_plain_head(model)
    mode = config.batching.mode
    wanted = mode == "packed" or config.parallelism.context > 1
    if not wanted and (mode != "auto" or device.type != "cpu"):  # there is nothing to try
        return False
    stir(model)
    can_pack = attention in ("auto", "sdpa") and packs(model)
    if wanted and not can_pack:
        chosen = "" if attention == "auto" else f" with policy.{config.backend}.attention={attention}"
        raise NotSupported(
            f"{type(model).__name__}{chosen} does not keep packed sequences apart; set policy.batching.mode to dynamic "
            "or auto, and policy.parallelism.context to 1"
        )
    return can_pack


def _small(model_config: Any, narrow: bool) -> Any:
    small = copy.deepcopy(model_config)
    text = small.get_text_config()
    layers = _layers(text)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    text.num_hidden_layers = layers
    for part in (small, text):
        part.pad_token_id = None  # it may be beyond the small vocabulary
        if text.vocab_size > VOCABULARY:
            part.vocab_size = VOCABULARY
    if narrow:
        _narrow(text)
    return small


def _layers(text: Any) -> int:
    """As many as it takes to have each kind of layer, and two at least."""
    kinds = list(getattr(text, "layer_types", None) or ())
    return min(int(text.num_hidden_layers), max([2, *(kinds.index(kind) + 1 for kind in kinds)]))


def _narrow(text: Any) -> None:
    """One group of heads, of the size that they have."""
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    text.num_attention_heads = heads // groups
    if hasattr(text, "num_key_value_heads"):
        text.num_key_value_heads = 1
    text.hidden_size = text.num_attention_heads * size
    for name in ("intermediate_size", "moe_intermediate_size"):
        if getattr(text, name, None):
            setattr(text, name, 64)


@torch.no_grad()
def stir(model: nn.Module) -> None:
    """Weights under which what a token attends to shows: a fresh model answers nearly the same whatever it sees."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / math.sqrt(parameter.shape[-1]))
